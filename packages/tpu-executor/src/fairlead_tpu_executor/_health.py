# SPDX-License-Identifier: Apache-2.0
"""Whether Ray's head and the hosts answer.

Ray waits for its head without a deadline, and notices the death of a node after 15 s to a minute. Requests to the head
go through `Head`, which gives them a deadline.
"""

import math
import socket
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import ray

from fairlead_placement.extension import Job, drain_deadlines, run_each, run_in_thread

from ._ray_private import head_answers
from .exceptions import HeadUnreachableError

_T = TypeVar("_T")
_PROBE_S = 1.0
# Probes that are further apart than this belong to different outages.
_GAP_S = 10.0
_CONNECT_S = 1.0


class Head:
    """Ray's head (its GCS), as one pool sees it. Tests replace `probe` and `clock`."""

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
        self._answered_at = clock() - _PROBE_S

    @property
    def silent_s(self) -> float:
        """Seconds since the first probe without an answer; 0 if the head answered the last probe."""
        return 0.0 if self._silent_since is None else self._clock() - self._silent_since

    def call(self, function: Callable[..., _T], *args: Any, undo: Callable[[_T], object] | None = None) -> _T:
        """Call a function that makes a request to the head when it answers a probe; `undo` reverses a late result."""
        if not ray.is_initialized():  # Ray connects in the main thread only.
            return function(*args)
        # Ray aborts a process whose request reaches a head without its old state (WrongClusterID in Ray 2.60).
        while self._clock() - self._answered_at >= _PROBE_S and self.check():
            time.sleep(min(_PROBE_S, self.timeout_s) / 2)
        return self.result(run_in_thread(function, *args), undo=undo)

    def result(self, job: Job[_T], *, undo: Callable[[_T], object] | None = None) -> _T:
        """Wait for the result of a request for as long as the head answers; `undo` is as for `call`."""

        def reverse(value: _T) -> None:
            if undo is not None and ray.is_initialized():
                undo(value)

        try:
            value = job.result(math.inf, undo and reverse, check=self.check)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RpcError) as failure:
            # Some requests of Ray to its head have their own deadlines.
            if not isinstance(failure, ray.exceptions.RayTaskError) and self.is_silent():
                raise HeadUnreachableError(self.silent_s) from failure
            raise
        self._silent_since, self._answered_at = None, self._clock()
        return value

    def is_silent(self) -> bool:
        """Probe the head once, which takes at most about a second, and return whether it did not answer."""
        began = self._clock()
        if self._probe(_PROBE_S):
            self._silent_since, self._answered_at = None, self._clock()
        elif self._silent_since is None or began - self._probed_at > _GAP_S:
            self._silent_since = began
        self._probed_at = self._clock()
        return self._silent_since is not None

    def check(self) -> bool:
        """Probe the head once, and return whether it is silent; raise `HeadUnreachableError` after `timeout_s`."""
        silent = self.is_silent()
        if silent and self.silent_s >= self.timeout_s:
            raise HeadUnreachableError(self.silent_s)
        return silent


def dead_nodes(node_ids: Collection[str]) -> frozenset[str]:
    return frozenset(node_ids) - {row["NodeID"] for row in ray.nodes() if row["Alive"]}


def gone_nodes(node_ids: Collection[str]) -> frozenset[str]:
    """Return the nodes that are dead or draining."""
    return dead_nodes(node_ids) | (drain_deadlines().keys() & node_ids)


def silent_nodes(node_ids: Collection[str]) -> frozenset[str]:
    """Return the nodes that are alive for Ray, but whose raylet accepts no connection: Ray may notice later."""
    rows = [row for row in ray.nodes() if row["Alive"] and row["NodeID"] in node_ids]
    answers = run_each(lambda row: _accepts(row["NodeManagerAddress"], row["NodeManagerPort"]), rows, 64)
    return frozenset(row["NodeID"] for row, answered in zip(rows, answers, strict=True) if not answered.result())


def _accepts(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_S):
            return True
    except OSError:
        return False
