# SPDX-License-Identifier: Apache-2.0
"""How errors are shown: short tracebacks, and no second report by Ray of errors that a call has already raised."""

import atexit
import logging
import threading
import weakref
from collections.abc import Iterable
from types import TracebackType

import ray
from ray import ObjectRef, ObjectRefGenerator

from fairlead_placement.spi import block_shutdown, connection, never_connect

from ..exceptions import WorkerGroupError

logger = logging.getLogger(__name__)

# Packages whose frames say nothing about the user's error.
INTERNAL = frozenset({"asyncio", "concurrent", "fairlead_placement", "fairlead_workergroup", "ray"})
LOOK_EVERY_S = 0.5


class short_traceback:
    """Drop the frames of Fairlead and Ray from the tracebacks of errors that Fairlead raises on purpose.

    The frame with the `with` statement stays, and so do frames of the user's code below it. Other errors, which may be
    a defect of Fairlead, keep all frames.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if traceback is None or error is None:
            return
        if not isinstance(error, (WorkerGroupError, ray.exceptions.RayError)) and not isinstance(
            error.__cause__, ray.exceptions.RayError
        ):
            return
        while isinstance(error.__context__, ray.exceptions.RayError) and error.__cause__ is None:
            error.__context__ = error.__context__.__context__
        kept, frame = [traceback], traceback.tb_next
        while frame is not None:
            if frame.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in INTERNAL:
                kept.append(frame)
            frame = frame.tb_next
        for above, below in zip(kept, [*kept[1:], None], strict=True):
            above.tb_next = below
        error.__traceback__ = kept[0]


class _Late:
    """Futures of one call whose errors nobody will ask for."""

    def __init__(self, futures: Iterable[ObjectRef | ObjectRefGenerator], owner: object) -> None:
        self._made_on = connection()
        self._refs = [future for future in futures if isinstance(future, ObjectRef)]
        self._generators = [future for future in futures if isinstance(future, ObjectRefGenerator)]
        self._owner = weakref.ref(owner)

    def has_ended(self) -> bool:
        """Look at what has failed by now; return whether there is nothing left to look at."""
        if self._made_on != connection():
            return True
        if self._refs:
            # Ray counts this as a look at the error, and it moves no values.
            _, self._refs = ray.wait(self._refs, num_returns=len(self._refs), timeout=0, fetch_local=False)
        # The items are the owner's as long as it lives. Ray drops the items of a generator that still runs silently.
        if self._generators and self._owner() is None:
            ends = {generator.completed(): generator for generator in self._generators}
            ended, _ = ray.wait(list(ends), num_returns=len(ends), timeout=0, fetch_local=False)
            for end in ended:
                for item in ends[end]:
                    ray.wait([item], timeout=0, fetch_local=False)
            self._generators = []
        return not self._refs and not self._generators


class _Looking:
    """The thread that looks at late errors, as long as there may be any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._late: list[_Late] = []
        self._thread: threading.Thread | None = None

    def add(self, late: _Late) -> None:
        with self._lock:
            self._late.append(late)
            if self._thread is None and not self._end.is_set():
                self._thread = threading.Thread(target=self._look, name="fairlead-late-errors", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread before Ray ends, at the exit of the interpreter."""
        self._end.set()
        thread = self._thread
        if thread is not None:
            thread.join(timeout=5)

    def _look(self) -> None:
        never_connect()
        while not self._end.wait(LOOK_EVERY_S):
            # Also while the references go.
            with block_shutdown():
                self._late_once()
            with self._lock:
                if not self._late:
                    self._thread = None
                    return

    def _late_once(self) -> None:
        ended = [late for late in list(self._late) if _has_ended(late)]
        with self._lock:
            self._late = [late for late in self._late if late not in ended]


def _has_ended(late: _Late) -> bool:
    try:
        return late.has_ended()
    except Exception as error:  # noqa: BLE001  Ray has ended meanwhile: there is nothing to print either
        logger.debug("cannot look at late errors: %s", error)
        return True


_looking = _Looking()
atexit.register(_looking.close)


def retrieve_late(futures: Iterable[ObjectRef | ObjectRefGenerator], owner: object) -> None:
    """Look at the errors of workers that fail later on, after the call has raised another worker's error.

    Ray prints an error with its traceback when its last reference goes and nobody has looked at it.

    Args:
        futures: results, and generators of them, of one call.
        owner: whoever may still take the items of the generators.
    """
    late = _Late(list(futures), owner)
    if not late.has_ended():
        _looking.add(late)
