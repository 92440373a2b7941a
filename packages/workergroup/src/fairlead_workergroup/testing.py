# SPDX-License-Identifier: Apache-2.0
"""Faults of workers, caused on purpose, for code that has to handle them.

They are real: a killed or a stopped process.

>>> from fairlead_placement import RayVirtualCluster, init_ray
>>> from fairlead_workergroup import RayWorkerGroup
>>> from fairlead_workergroup.testing import resume, stop
>>> _ = init_ray(address="local", num_cpus=2)
>>> with RayVirtualCluster([2], use_gpus=False) as cluster, RayWorkerGroup(cluster, "collections.Counter") as group:
...     stop(group, 1)
...     call = group.call("total")
...     call.wait(0.5)
...     resume(group, 1)
...     call.result()
False
[0, 0]
>>> import ray
>>> ray.shutdown()
"""

import signal
from collections.abc import Callable
from typing import Any

from fairlead_placement.testing import assert_no_leaks

from ._group import RayWorkerGroup
from ._membership.core import find_core
from ._membership.operations import check_members
from ._model import Member
from ._observe.query import ANSWER_S, ask_nodes
from ._remote.node import send_and_wait
from ._remote.process import send_signal
from .exceptions import WorkerGroupError

__all__ = ["assert_no_leaks", "kill", "resume", "stop"]

# How long an agent waits within a request.
WITHIN_S = 0.8 * ANSWER_S


def kill(group: RayWorkerGroup, rank: int) -> None:
    """Kill a worker's process with SIGKILL, and wait until it has ended; nothing happens if it had ended before.

    Raises:
        IndexError, TypeError: there is no such rank.
        WorkerGroupError: the group, or its Ray, has been shut down, or the worker's node failed to do it.
    """
    worker = _worker(group, rank)
    if not _on_node(worker, send_and_wait, signal.SIGKILL, WITHIN_S):
        raise WorkerGroupError(f"{worker} is still alive {WITHIN_S:g} s after SIGKILL")


def stop(group: RayWorkerGroup, rank: int) -> None:
    """Stop a worker's process with SIGSTOP, whatever it is doing, and wait until it has stopped.

    Raises:
        IndexError, TypeError: there is no such rank.
        WorkerGroupError: the group, or its Ray, has been shut down, or the worker's node failed to do it.
    """
    worker = _worker(group, rank)
    if not _on_node(worker, send_and_wait, signal.SIGSTOP, WITHIN_S):
        raise WorkerGroupError(f"{worker} has not been stopped within {WITHIN_S:g} s of SIGSTOP")


def resume(group: RayWorkerGroup, rank: int) -> None:
    """Let a worker continue that `stop` has stopped; nothing happens if it is dead or not stopped.

    Raises:
        IndexError, TypeError: there is no such rank.
        WorkerGroupError: the group, or its Ray, has been shut down, or the worker's node failed to do it.
    """
    _on_node(_worker(group, rank), send_signal, signal.SIGCONT)


def _worker(group: RayWorkerGroup, rank: Any) -> Member:
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"rank must be an int, got {rank!r}")
    now = find_core(group).check_alive()
    check_members([rank], now)
    return now.members[rank]


def _on_node(worker: Member, function: Callable[..., list[bool]], *more: Any) -> bool:
    (done,) = ask_nodes([worker], function, *more)
    if done is None:
        raise WorkerGroupError(f"the node of {worker} is lost, or does not answer")
    return bool(done)
