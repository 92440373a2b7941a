# SPDX-License-Identifier: Apache-2.0
"""Signals at every moment at which Python may run a handler."""

import dis
import signal
import sys
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any

# Python runs handlers when one of these instructions has been executed, and when a function begins.
LETS_HANDLERS_RUN = ("CALL", "JUMP_BACKWARD", "RESUME")


class Interrupter:
    """Raises a signal at one moment of a run.

    Args:
        number: the signal.
        files: the ends of the names of the files whose code is interrupted.
        moment: at which of the moments of these files, from 0.
    """

    def __init__(self, number: int, files: tuple[str, ...], moment: int) -> None:
        self._number = number
        self._files = files
        self._left = moment
        self._last: dict[FrameType, int] = {}
        self.has_raised = False

    def __enter__(self) -> "Interrupter":
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.endswith(self._files):
            return None
        frame.f_trace_opcodes = True
        return self._trace_opcode

    def _trace_opcode(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode" and not self.has_raised:
            last, self._last[frame] = self._last.get(frame), frame.f_lasti
            if last is not None and _names(frame.f_code).get(last, "").startswith(LETS_HANDLERS_RUN):
                if not self._left:
                    self.has_raised = True
                    signal.raise_signal(self._number)
                self._left -= 1
        return self._trace_opcode


@cache
def _names(code: CodeType) -> dict[int, str]:
    return {one.offset: one.opname for one in dis.get_instructions(code)}


def interrupt_everywhere(run: Callable[[], object], number: int, *files: str) -> int:
    """Run a function again and again, each time with a signal at the next moment of the code of some files.

    The function has to handle what the handler of the signal raises, and to check what must hold afterwards.

    Returns:
        The number of moments.
    """
    moment = 0
    while True:
        with Interrupter(number, files, moment) as interrupter:
            run()
        if not interrupter.has_raised:
            return moment
        moment += 1
