# SPDX-License-Identifier: Apache-2.0
"""Questions to Ray's head, each with a deadline: Ray itself waits for as long as the head does not answer."""

import math
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import ray

from fairlead_placement.spi import never_connect

from ._ray_private import head_answers
from .exceptions import HeadUnreachableError

__all__ = ["Head", "Question"]

_T = TypeVar("_T")
_PROBE_S = 1.0
# Probes that are further apart than this belong to different outages.
_GAP_S = 10.0


class Question(Generic[_T]):
    """A function that asks the head, on a thread of its own: the call cannot be interrupted while the head is silent.

    Args:
        head: the head that is asked.
        function: the function.
        args: its arguments.
        undo: takes back what the function did if it returns after everybody has stopped waiting for it.
    """

    def __init__(
        self, head: "Head", function: Callable[..., _T], args: tuple[Any, ...], undo: Callable[[_T], object] | None
    ) -> None:
        self._head, self._function, self._args, self._undo = head, function, args, undo
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._abandoned = False
        self._value: _T | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="fairlead-head", daemon=True).start()

    @property
    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._over.is_set()

    def result(self) -> _T:
        """Wait for what the function returns.

        Raises:
            HeadUnreachableError: the head did not answer in time.
            Exception: what the function raised.
        """
        try:
            while not self._over.wait(_PROBE_S):
                self._head.check()
        except HeadUnreachableError:
            self._abandon()
            raise
        except BaseException:  # an interrupt: what was begun is finished, and then taken back
            while self._undo is not None and not self._over.wait(_PROBE_S) and not self._head.is_silent():
                pass
            self._abandon()
            raise
        if self._error is not None:
            if _timed_out(self._error) and self._head.is_silent():
                raise HeadUnreachableError(self._head.silent_s) from self._error
            raise self._error
        self._head.heard()
        return self._value  # type: ignore[return-value]

    def _run(self) -> None:
        never_connect()
        try:
            self._value = self._function(*self._args)
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            self._error = error
        with self._lock:
            self._over.set()
            late = self._abandoned
        if late:
            self._take_back()

    def _abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            over = self._over.is_set()
        if over:
            self._take_back()

    def _take_back(self) -> None:
        if self._undo is not None and self._error is None and ray.is_initialized():
            self._undo(self._value)  # type: ignore[arg-type]


def _timed_out(error: BaseException) -> bool:
    """Whether Ray gave up a request to its head, some of which have deadlines of their own."""
    kinds = (ray.exceptions.GetTimeoutError, ray.exceptions.RpcError)
    return isinstance(error, kinds) and not isinstance(error, ray.exceptions.RayTaskError)


class Head:
    """Ray's head (its GCS), as one pool sees it.

    Args:
        timeout_s: seconds for which it may be silent before questions end as `HeadUnreachableError`.
        probe: returns whether it answers within so many seconds; for tests.
        clock: for tests.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        probe: Callable[[float], bool] = head_answers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timeout_s = timeout_s
        self._probe, self._clock = probe, clock
        self._silent_since: float | None = None
        self._probed_at = clock()
        self._heard_at = -math.inf

    @property
    def silent_s(self) -> float:
        """Seconds since the head did not answer for the first time; 0 if it answered the last time."""
        return 0.0 if self._silent_since is None else self._clock() - self._silent_since

    def ask(self, function: Callable[..., _T], *args: Any, undo: Callable[[_T], object] | None = None) -> _T:
        """Call a function that asks the head, and return what it returns, however long that takes.

        It is called only once the head answers a probe, or has answered within the last second: Ray aborts a process
        whose request for the nodes is answered by a head that has lost its state (`Check failed ... WrongClusterID` in
        Ray 2.60).

        Args:
            function: the function.
            args: its arguments.
            undo: takes back what the function did if it returns after the deadline.

        Raises:
            HeadUnreachableError: the head did not answer for `timeout_s`.
            Exception: what the function raised.
        """
        if not ray.is_initialized():  # Ray connects in the main thread only
            return function(*args)
        while self._clock() - self._heard_at >= _PROBE_S and self.is_silent():
            self._raise_if_late()
            time.sleep(min(_PROBE_S, self.timeout_s) / 2)
        return self.start(function, *args, undo=undo).result()

    def start(
        self, function: Callable[..., _T], *args: Any, undo: Callable[[_T], object] | None = None
    ) -> Question[_T]:
        """As `ask`, without a probe before, and without waiting for the result."""
        return Question(self, function, args, undo)

    def is_silent(self) -> bool:
        """Probe the head once, which takes at most about a second, and return whether it did not answer."""
        began = self._clock()
        if self._probe(_PROBE_S):
            self.heard()
        elif self._silent_since is None or began - self._probed_at > _GAP_S:
            self._silent_since = began
        self._probed_at = self._clock()
        return self._silent_since is not None

    def check(self) -> None:
        """Probe the head once.

        Raises:
            HeadUnreachableError: it has not answered for `timeout_s`.
        """
        if self.is_silent():
            self._raise_if_late()

    def _raise_if_late(self) -> None:
        if self.silent_s >= self.timeout_s:
            raise HeadUnreachableError(self.silent_s)

    def heard(self) -> None:
        """Note that the head has answered."""
        self._silent_since = None
        self._heard_at = self._clock()
