# SPDX-License-Identifier: Apache-2.0
"""The report of a lost worker."""

import contextlib
import gc
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_workergroup import (
    CallTimeoutError,
    RayWorkerBuilder,
    RayWorkerGroup,
    WorkerFailureError,
    WorkerStartError,
    current_worker,
)
from fairlead_workergroup.testing import kill


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


def test_death_that_ray_has_not_noticed(doomed: RayWorkerGroup) -> None:
    """A call names a worker that has died, although a process that it forked holds its connections with Ray."""

    def end(worker: object, pid: int) -> None:
        if os.getpid() == pid:
            os.kill(pid, signal.SIGKILL)
        while os.path.exists(f"/proc/{pid}/exe"):  # a process that has ended has none
            time.sleep(0.01)
        raise RuntimeError("a collective failed")

    pid = doomed.at(dp=1).call(fork, collect=()).result()
    with pytest.raises(WorkerFailureError) as caught:
        doomed.call(end, pid, timeout=60).result()
    assert [(failure.rank, failure.kind) for failure in caught.value.failures] == [(1, "killed")]


class Doomed:
    """A worker that ends in several ways."""

    def leave(self, how: str) -> None:
        if how == "exit":
            sys.exit(3)
        os._exit(3)

    def pid(self) -> int:
        return os.getpid()

    def wait(self) -> None:
        time.sleep(600)

    def give_lock(self) -> object:
        return threading.Lock()

    def fail(self) -> None:
        try:
            int("x")
        except ValueError as error:
            raise RuntimeError("outer") from error


@pytest.fixture
def three(local_ray: None) -> Iterator[RayWorkerGroup]:
    with (
        RayVirtualCluster([3], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Doomed, sharding_annotations=NamedSharding.from_shape(dp=3)) as group,
    ):
        yield group


@pytest.mark.parametrize("how", ["killed", pytest.param("while idle", marks=pytest.mark.nightly), "exits"])
def test_all_dead_workers_are_named(three: RayWorkerGroup, how: str) -> None:
    """Workers that die together are all in one error, each with its log file; the next call names them too."""
    pids = three.call("pid").result()
    call = three.call("wait") if how == "killed" else None
    if how == "exits":
        call = three.call("leave", "exit")
        assert call.wait(60)  # on a busy machine, a worker may take a second longer to exit than another one
    else:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    for ask in (lambda: (call or three.call("pid", timeout=60)).result(timeout=60), lambda: three.call("pid")):
        with pytest.raises(WorkerFailureError) as caught:
            ask()
        failures = caught.value.failures
        assert [failure.rank for failure in failures] == [0, 1, 2]
        assert {(failure.kind, failure.exit_code) for failure in failures} == {
            ("exited", 3) if how == "exits" else ("killed", None)
        }
        for failure, pid in zip(failures, pids, strict=True):
            assert failure.log.endswith(f"-{pid}.err")
            assert os.path.exists(failure.log)
            assert failure.log in str(caught.value)
        assert "`restart_failed_workers()` starts them again" in str(caught.value)
    assert three.restart_failed_workers() == [0, 1, 2]


def test_a_dead_worker_that_had_answered_is_named(three: RayWorkerGroup) -> None:
    """The error of a call names each of its workers that is known to be dead, also one whose reply had come."""

    def wait_on_the_last(worker: object) -> None:
        time.sleep(60 * (current_worker().rank == 2))

    pids = three.call("pid").result()
    call = three.call(wait_on_the_last)
    three.at(dp=slice(0, 2)).call("pid").result()  # so they have answered
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while any(status.state != "dead" for status in three.get_worker_status()):
        assert time.monotonic() < deadline
    with pytest.raises(WorkerFailureError) as caught:
        call.result(timeout=60)
    assert [failure.rank for failure in caught.value.failures] == [0, 1, 2]


def test_a_result_that_cannot_be_pickled(three: RayWorkerGroup) -> None:
    """The error names the method, and says that it has run."""
    with pytest.raises(TypeError, match="the result of 'give_lock' cannot be pickled: cannot pickle") as caught:
        three.call("give_lock").result(timeout=60)
    assert re.match(r"raised by rank \d \(dp=\d\) on node", caught.value.__notes__[0])


def count_remote_tracebacks(error: BaseException) -> int:
    """Return how often a printed traceback shows where a worker was."""
    return "".join(traceback.format_exception(error)).count('raise RuntimeError("outer")')


def test_one_remote_traceback(three: RayWorkerGroup) -> None:
    """However many workers have raised an error, what is printed has the traceback of one of them, once."""
    call = three.call("fail")
    assert call.wait(60)
    with pytest.raises(RuntimeError, match="outer") as caught:
        call.result()
    assert len(caught.value.__notes__) == 3
    assert count_remote_tracebacks(caught.value) == 1
    with (
        RayVirtualCluster([1], use_gpus=False) as cluster,
        pytest.raises(WorkerStartError, match="no model") as start,
    ):
        RayWorkerGroup(cluster, RayWorkerBuilder(NoModel))
    assert "".join(traceback.format_exception(start.value)).count('raise OSError("no model")') == 1


def test_errors_behind_the_first_one(three: RayWorkerGroup, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ray does not log the errors of other workers that arrive after the error of the call has been raised."""

    def fail(worker: object, folder: str) -> None:
        rank = os.environ["RANK"]
        while rank != "0" and not os.path.exists(f"{folder}/raised"):
            time.sleep(0.01)
        raise ValueError(f"{rank} failed")

    log = logging.getLogger("ray._private.worker")
    log.addHandler(caplog.handler)
    try:
        with contextlib.suppress(ValueError):  # `pytest.raises` would keep the call, and with it the references
            three.call(fail, str(tmp_path)).result(timeout=60)
        gc.collect()
        (tmp_path / "raised").touch()
        three.call("pid").result(timeout=60)  # it is behind the other errors
    finally:
        log.removeHandler(caplog.handler)
    assert "Unhandled error" not in caplog.text


class NoModel:
    def __init__(self) -> None:
        raise OSError("no model")


@pytest.mark.nightly
def test_silent_head_and_agent(
    three: RayWorkerGroup,
    agent_pids: Callable[..., list[int]],
    stop_process: Callable[..., contextlib.AbstractContextManager[object]],
) -> None:
    """With a silent head or a stopped node agent, errors come by the deadline of their call and a second more."""
    head = ray._private.worker._global_node.all_processes["gcs_server"][0].process.pid
    (agent,) = agent_pids()
    for stopped in (head, agent):
        with stop_process(stopped):
            for timeout in (0.0, 1.0):
                began = time.monotonic()
                with pytest.raises(CallTimeoutError):
                    three.at(dp=0).call("wait", timeout=timeout).result()
                assert time.monotonic() - began < timeout + 1.5
        three.at(dp=0).call("pid", timeout=0.0)
        kill(three, 0)
        three.restart_failed_workers()
        pid = three.at(dp=1).call("pid", collect=()).result()
        with stop_process(stopped):
            os.kill(pid, signal.SIGKILL)
            began = time.monotonic()
            with pytest.raises(WorkerFailureError) as caught:
                three.at(dp=1).call("pid", timeout=3).result()
            assert time.monotonic() - began < 4.5
            assert [(failure.rank, failure.kind) for failure in caught.value.failures] == [(1, "killed")]
        three.restart_failed_workers()


@pytest.mark.nightly
def test_resize_with_a_stopped_agent(
    three: RayWorkerGroup,
    agent_pids: Callable[..., list[int]],
    stop_process: Callable[..., contextlib.AbstractContextManager[object]],
) -> None:
    """`resize(timeout=...)` returns by its deadline, also if the agent that leases the port does not answer."""
    (agent,) = agent_pids()
    with stop_process(agent):
        began = time.monotonic()
        with contextlib.suppress(Exception):
            three.resize(dp=2, timeout=5)
        assert time.monotonic() - began < 7
