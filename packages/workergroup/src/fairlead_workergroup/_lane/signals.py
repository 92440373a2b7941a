# SPDX-License-Identifier: Apache-2.0
"""Signals whose handlers wait for the end of a message, because one that was sent or received in part ends the lane."""

import importlib.util
import signal
import threading
from collections.abc import Callable
from typing import Any

# Those whose handlers raise: Python's for SIGINT, Ray's for SIGTERM, and a user's for SIGALRM.
SIGNALS = (int(signal.SIGINT), int(signal.SIGTERM), int(signal.SIGALRM))
_MAIN = threading.main_thread().ident
# The module below `signal`, which turns everything into enumerations and so takes ten times as long.
_fast: Any = importlib.import_module("_signal" if importlib.util.find_spec("_signal") else "signal")


class Delay:
    """Runs the handlers of signals at the end of a block of the main thread; `arrived` ends a wait there."""

    def __init__(self, arrived: Callable[[], None]) -> None:
        self._arrived = arrived
        self._handlers: dict[int, Any] = {}
        self._kept: list[tuple[int, Any]] = []
        self._is_over = False

    def __enter__(self) -> None:
        if threading.get_ident() == _MAIN:
            for number in SIGNALS:
                if callable(handler := _fast.getsignal(number)):
                    self._handlers[number] = handler
                    _fast.signal(number, self._keep)

    def _keep(self, number: int, frame: Any) -> None:
        if self._is_over:  # another handler has raised before this one was put back
            self._handlers[number](number, frame)
        else:
            self._kept.append((number, frame))
            self._arrived()

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for number, handler in self._handlers.items():
            _fast.signal(number, handler)
        for number, frame in self._kept:
            self._handlers[number](number, frame)
