# SPDX-License-Identifier: Apache-2.0
"""Faults of workers, caused on purpose, for code that has to handle them.

They are real: a killed process, a thread in a native call that does not return, memory that is in use.

>>> from fairlead_placement import RayVirtualCluster, init_ray
>>> from fairlead_workergroup import RayWorkerGroup
>>> from fairlead_workergroup.testing import hang
>>> _ = init_ray(address="local", num_cpus=2)
>>> with RayVirtualCluster([2], use_gpus=False) as cluster, RayWorkerGroup(cluster, "collections.Counter") as group:
...     with hang(group, 1, "native"):
...         [status.state for status in group.get_worker_status()]
['idle', 'busy']
>>> import ray
>>> ray.shutdown()
"""

import math
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import ray

from fairlead_placement.testing import assert_no_leaks

from ._calls.sender import find_sender
from ._group import RayWorkerGroup
from ._membership.model import Member, WorkerProcess
from ._observe.evidence import judge_errors
from ._observe.query import ANSWER_S, ask_nodes, cancel_calls
from ._remote import faults
from .exceptions import WorkerFailureError, WorkerGroupError
from .spi import read_members

__all__ = ["Hang", "assert_no_leaks", "fill_memory", "hang", "kill", "slow"]

Way = Literal["sleep", "native", "native-gil", "stop"]
WAYS: tuple[Way, ...] = get_args(Way)
# How long an agent waits within a request.
WITHIN_S = 0.8 * ANSWER_S


def kill(group: RayWorkerGroup, rank: int) -> None:
    """Kill a worker's process with SIGKILL, and wait until it has ended; nothing happens if it had ended before.

    Raises:
        IndexError, TypeError: there is no such rank.
        WorkerGroupError: the group, or its Ray, has been shut down, or the worker's node failed to do it.
    """
    worker = _member(group, rank).process
    if not _on_node(worker, faults.kill, WITHIN_S):
        raise WorkerGroupError(f"{worker} is still alive {WITHIN_S:g} s after SIGKILL")


class Hang(AbstractContextManager["Hang"]):
    """A worker that hangs until `close`; a context manager, which `hang` returns.

    Attributes:
        rank: the worker's number in its group.
        how: the way to hang, as given to `hang`.
    """

    def __init__(self, worker: WorkerProcess, how: Way, token: str = "", ref: ray.ObjectRef[Any] | None = None) -> None:
        self.how: Way = how
        self.rank: int = worker.rank
        self._worker: WorkerProcess | None = worker
        self._token = token
        self._ref = ref

    def __repr__(self) -> str:
        return f"Hang({self.rank}, {self.how!r}{', closed' if self._worker is None else ''})"

    def close(self) -> None:
        """Let the worker continue, if it is still alive. Can be repeated."""
        worker, self._worker = self._worker, None
        if worker is None or not ray.is_initialized():
            return
        if self._ref is None:
            ask_nodes([worker], faults.continue_)
        else:
            ask_nodes([worker], faults.end_hang, self._token)
            ray.wait([self._ref], timeout=ANSWER_S)

    def __exit__(self, *error: object) -> None:
        self.close()


def hang(group: RayWorkerGroup, rank: int, how: Way = "sleep", *, timeout_s: float = 60.0) -> Hang:
    """Make a worker hang in a separate call named "hang", and wait until it does.

    Args:
        group: the group of the worker.
        rank: the worker's number in the group.
        how: "sleep" hangs in Python, "native" in a system call that does not return, "native-gil" in such a call that
            holds the GIL; "stop" stops the whole process, whatever it is doing (SIGSTOP).
        timeout_s: seconds to wait until the worker has finished its current call; "stop" does not wait for that.

    Returns:
        A handle whose `close` lets the worker continue.

    Raises:
        IndexError, TypeError, ValueError: there is no such rank, or no such way.
        TimeoutError: the worker was busy for too long; it will not hang later.
        WorkerGroupError: the group, or its Ray, has been shut down, or the worker's node failed to do it.
        WorkerFailureError: the worker is dead.
    """
    if how not in WAYS:
        raise ValueError(f"how must be one of {', '.join(map(repr, WAYS))}, got {how!r}")
    member = _member(group, rank)
    worker = member.process
    if how == "stop":
        if not _on_node(worker, faults.stop, WITHIN_S):
            raise WorkerGroupError(f"{worker} has not been stopped within {WITHIN_S:g} s of SIGSTOP")
        return Hang(worker, how)
    token = uuid.uuid4().hex[:8]
    ref = _run(member, "hang", faults.hang, how, token)
    deadline = time.monotonic() + timeout_s
    while not _on_node(worker, faults.find_hanging, token):
        if ray.wait([ref], timeout=0.02)[0]:
            _answer(group, worker, ref, timeout_s=0)
        # A hang that has just started cannot be cancelled; the next look finds it.
        if time.monotonic() >= deadline and not cancel_calls([(worker, ref)]):
            raise TimeoutError(f"{worker} has not begun to hang within {timeout_s:g} s, because it is busy")
    return Hang(worker, how, token, ref)


def slow(group: RayWorkerGroup, rank: int, seconds: float, *, timeout_s: float = 60.0) -> None:
    """Make each later call of a worker take longer, and wait until this is in effect; 0 seconds ends it.

    Args:
        group: the group of the worker.
        rank: the worker's number in the group.
        seconds: the additional time of each call.
        timeout_s: seconds to wait until the worker has finished its current call.

    Raises:
        IndexError, TypeError, ValueError: there is no such rank, or `seconds` is negative or not a number.
        TimeoutError: the worker was busy for too long; it will not be slow later.
        WorkerGroupError: the group, or its Ray, has been shut down.
        WorkerFailureError: the worker is dead.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
        raise ValueError(f"seconds must be a number of at least 0, got {seconds!r}")
    member = _member(group, rank)
    _answer(group, member.process, _run(member, "slow", faults.slow, seconds), timeout_s=timeout_s)


def fill_memory(group: RayWorkerGroup, rank: int, size_bytes: int, *, timeout_s: float = 60.0) -> bool:
    """Make a worker use additional memory, every page of it; 0 bytes releases the memory.

    Args:
        group: the group of the worker.
        rank: the worker's number in the group.
        size_bytes: the additional memory.
        timeout_s: seconds to wait until the worker has finished its current call and holds the memory.

    Returns:
        Whether the worker survived; something may end it because of its memory.

    Raises:
        IndexError, TypeError, ValueError: there is no such rank, or `size_bytes` is negative or not a whole number.
        TimeoutError: the worker was busy for too long.
        MemoryError: the worker could not allocate the memory.
        WorkerGroupError: the group, or its Ray, has been shut down.
    """
    if isinstance(size_bytes, bool) or not isinstance(size_bytes, int) or size_bytes < 0:
        raise ValueError(f"size_bytes must be a whole number of at least 0, got {size_bytes!r}")
    member = _member(group, rank)
    ref = _run(member, "fill_memory", faults.fill_memory, size_bytes)
    try:
        _answer(group, member.process, ref, timeout_s=timeout_s)
    except WorkerFailureError:
        return False
    return True


def _member(group: RayWorkerGroup, rank: Any) -> Member:
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"rank must be an int, got {rank!r}")
    if not 0 <= rank < group.world_size:
        raise IndexError(f"rank {rank} is out of range: the group has ranks 0 to {group.world_size - 1}")
    return read_members(group)[rank]


def _run(member: Member, name: str, function: Callable[..., Any], *args: Any) -> ray.ObjectRef[Any]:
    """Run a function on the host of a worker, in its turn."""
    ref: ray.ObjectRef[Any] = member.handle._fairlead_run.remote(name, function, *args)
    return ref


def _on_node(worker: WorkerProcess, function: Callable[..., list[bool]], *more: Any) -> bool:
    (done,) = ask_nodes([worker], function, *more)
    if done is None:
        raise WorkerGroupError(f"the node of {worker} is lost, or does not answer")
    return bool(done)


def _answer(group: RayWorkerGroup, worker: WorkerProcess, ref: Any, *, timeout_s: float) -> None:
    try:
        ray.get(ref, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        cancel_calls([(worker, ref)])
        raise TimeoutError(f"{worker} has not done it within {timeout_s:g} s, because it is busy") from error
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        if not (lost := judge_errors(find_sender(group).roster.judge, {worker: error})):
            raise
        raise WorkerFailureError((lost[0].failure(),)) from error
