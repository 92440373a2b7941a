# SPDX-License-Identifier: Apache-2.0
"""The report of a lost worker."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from fairlead_workergroup import RayWorkerGroup, WorkerFailureError
from fairlead_workergroup._remote.process import start_tick
from fairlead_workergroup.testing import kill

from ..faults import delay_nodes


def test_exit_code_and_signal(doomed: RayWorkerGroup) -> None:
    """A failure reports the exit code or the signal of the worker if Ray knows it, and otherwise neither."""

    def end(worker: object, how: str) -> None:
        if how == "exit":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGTERM if how == "terminate" else signal.SIGKILL)
        time.sleep(60)

    ended = []
    for how in ("exit", "terminate", "kill"):
        with pytest.raises(WorkerFailureError) as caught:
            doomed.at(dp=0).call(end, how, timeout=60).result()
        (failure,) = caught.value.failures
        ended.append((failure.exit_code, failure.signal))
        assert ("exit code 3" in str(failure), "SIGTERM" in str(failure)) == (how == "exit", how == "terminate")
        assert doomed.restart_failed_workers() == [0]
    assert ended == [(3, None), (None, signal.SIGTERM), (None, None)]


def fork(worker: object) -> int:
    """Start a process that holds the connections of this one with Ray, which will not notice the death of this one."""
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    return os.getpid()


@contextlib.contextmanager
def busy_nodes() -> Iterator[None]:
    """Let each look at a node take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        delay_nodes(patch, 2.0)
        yield


@pytest.mark.nightly
def test_restart_while_nodes_are_busy(doomed: RayWorkerGroup) -> None:
    """A restart finds a death that Ray has not noticed, although the node answers after seconds."""
    doomed.at(dp=1).call(fork).result()
    kill(doomed, 1)
    with busy_nodes():
        assert doomed.restart_failed_workers() == [1]


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param(contextlib.nullcontext, id="idle nodes"),
        pytest.param(busy_nodes, id="busy nodes", marks=pytest.mark.nightly),
    ],
)
def test_death_that_ray_has_not_noticed(
    doomed: RayWorkerGroup, nodes: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    """A call names a worker that has died, although a process that it forked holds its connections with Ray."""

    def end(worker: object, pid: int) -> None:
        if os.getpid() == pid:
            os.kill(pid, signal.SIGKILL)
        while start_tick(pid) >= 0:
            time.sleep(0.01)
        raise RuntimeError("a collective failed")

    pid = doomed.at(dp=1).call(fork, collect=()).result()
    with nodes(), pytest.raises(WorkerFailureError) as caught:
        doomed.call(end, pid, timeout=60).result()
    assert [(failure.rank, failure.kind) for failure in caught.value.failures] == [(1, "killed")]
