# SPDX-License-Identifier: Apache-2.0
"""Handles of groups that another process has made, also while that process is stopped."""

import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from fairlead_placement import PlacementError, RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_workergroup import (
    CallTimeoutError,
    RayWorkerBuilder,
    RayWorkerGroup,
    Shard,
    StaleGroupError,
    WorkerFailureError,
    WorkerGroupError,
    attach,
    current_worker,
)
from fairlead_workergroup.testing import kill

from ..calling import wait_until_published

SECRET = "secret-in-an-argument"


class Worker:
    def __init__(self, secret=SECRET):
        self.rank = int(os.environ["RANK"])
        self.total = 0

    def add(self, value, times=1):
        self.total += value * times
        return self.rank, self.total

    def pid(self):
        return os.getpid()

    def square(self, value):
        return value * value

    def count(self, most):
        yield from range(most)

    def wait_for(self, gate):
        while not os.path.exists(gate):
            time.sleep(0.01)

    def fail(self, text):
        raise ValueError(text)


@ray.remote(num_cpus=0)
class Controller:
    """Calls a group that the driver has made, as an RL controller does."""

    def run(self, handle):
        added = handle.call("add", Shard([1, 10], "dp"), times=2, collect="dp").result()
        one = handle.at(dp=1, tp=0).call("add", 0, collect=()).result()
        squares = list(handle.map("square", range(10)))
        counted = handle.at(dp=0).call("count", 3, collect=()).result()
        own = handle.call(lambda worker, plus: worker.rank + plus, 100).result()
        states = [(one.rank, one.name, one.state, one.pid) for one in handle.status()]
        return added, one, squares, counted, own, states

    def run_async(self, handle):
        import asyncio

        async def call():
            return await handle.call("pid")

        return asyncio.run(call())

    def fail(self, handle):
        try:
            handle.call("fail", "its own").result()
        except ValueError as error:
            return str(error), error.__notes__


@pytest.fixture(scope="module")
def group(local_ray):
    with (
        RayVirtualCluster([4], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster,
            Worker,
            name_prefix="policy",
            sharding_annotations=NamedSharding.from_shape(dp=2, tp=2),
        ) as made,
    ):
        yield made


def refused(handle):
    """Return the error of a call; "" if it was made."""
    try:
        handle.call("pid").result()
    except WorkerGroupError as error:
        return str(error)
    return ""


@pytest.mark.smoke
def test_in_another_process(group):
    """A handle that was sent to an actor calls the workers as the group does, and reports what they are doing."""
    controller = Controller.remote()
    added, one, squares, counted, own, states = ray.get(controller.run.remote(group.handle()))
    assert added == [(0, 2), (2, 20)]
    assert one == (2, 20)
    assert squares == [value * value for value in range(10)]
    assert counted == [0, 1, 2]
    assert own == [100, 101, 102, 103]
    pids = group.call("pid").result()
    assert states == [(rank, f"policy-0-{rank}", "idle", pids[rank]) for rank in range(4)]
    assert ray.get(controller.run_async.remote(group.handle())) == pids
    text, notes = ray.get(controller.fail.remote(group.handle()))
    assert text == "its own"
    assert notes[0].startswith("raised by rank ")
    ray.kill(controller)


def test_plain_data(group):
    """A handle is small, holds no handle of an actor and no argument, and several copies are the same group."""
    handle = group.handle()
    handle.call("pid").result()  # what it has found since is not pickled
    pickled = pickle.dumps(handle)
    assert len(pickled) < 1000
    assert SECRET.encode() not in pickled
    copy = pickle.loads(pickled)
    assert (repr(copy), copy.group_id) == (repr(handle), handle.group_id)
    assert copy.at().ranks == group.at().ranks
    assert copy.sharding_annotations == group.sharding_annotations
    assert attach("policy").group_id == handle.group_id
    assert attach(handle.group_id[:8]).name == "policy"
    with pytest.raises(TypeError, match=r"send its `handle\(\)` instead"):
        pickle.dumps(group)


def test_another_cluster(group, monkeypatch):
    """A handle that has come to a process of another cluster says so."""
    handle, address = pickle.loads(pickle.dumps(group.handle())), ray.get_runtime_context().gcs_address
    here = SimpleNamespace(get_session_name=lambda: "session_2", gcs_address="10.0.0.2:6379")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    assert repr(handle) == f"GroupHandle('policy', '{handle.group_id[:6]}')"
    for use in (lambda: handle.call("add", 1), handle.status, lambda: handle.group_epoch):
        with pytest.raises(
            WorkerGroupError, match=f"is on the cluster at {re.escape(address)}, and this process is conn"
        ):
            use()


def test_checks(group, gate, wait_until_running):
    """Wrong calls are refused before anything is sent, and a deadline names the late workers."""
    handle = group.handle()
    with pytest.raises(AttributeError, match="'missing'"):
        handle.call("missing")
    with pytest.raises(TypeError, match="add"):
        handle.call("add", 1, 2, 3)
    with pytest.raises(ValueError, match="process that made the group"):
        handle.call("add", 1, retries=1)
    assert handle.at().explain("add", 1).startswith("add: 4 of 4 workers called")
    call = handle.call("wait_for", gate, timeout=0.2)
    wait_until_running(group, "wait_for", 0, 1, 2, 3)
    with pytest.raises(CallTimeoutError, match="in 'wait_for' for"):
        call.result()
    gate.touch()
    call.wait()
    with pytest.raises(WorkerGroupError, match="There is no group 'critic'"):
        attach("critic")
    with pytest.raises(PlacementError, match=r"Call ray.shutdown\(\) before"):
        attach("policy", "127.0.0.1:1")


def test_restart(local_ray, eventually):
    """A loss is raised until the group has restarted the worker; then a handle of the old epoch finds the new one."""
    with RayVirtualCluster([2], use_gpus=False) as cluster, RayWorkerGroup(cluster, Worker) as group:
        handle = group.handle()
        before, epoch = handle.call("pid").result(), handle.group_epoch
        kill(group, 1)
        for _ in range(2):
            with pytest.raises(WorkerFailureError, match="Only the process that made the group") as raised:
                handle.call("pid").result()
            assert [failure.rank for failure in raised.value.failures] == [1]
        assert handle.at(worker=0).call("pid").result() == [before[0]]
        group.restart_failed_workers()
        assert eventually(lambda: not refused(handle), 60)
        after = handle.call("pid").result()
        assert after[0] == before[0]
        assert after[1] != before[1]
        assert handle.group_epoch > epoch
    assert eventually(lambda: "has ended" in refused(handle), 60)


class Unlucky(Worker):
    """A worker that cannot start again while there is a file."""

    def __init__(self, obstacle):
        super().__init__()
        if current_worker().incarnation and os.path.exists(obstacle):
            raise OSError("cannot start again")


def test_restart_that_fails(local_ray, tmp_path):
    """Ranks that a restart could not start are lost to handles too, and not about to start."""
    obstacle = tmp_path / "obstacle"
    obstacle.touch()
    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, RayWorkerBuilder(Unlucky, str(obstacle))) as group,
    ):
        handle = group.handle()
        assert handle.call("pid").result() == group.call("pid").result()
        kill(group, 1)
        with pytest.raises(WorkerFailureError, match="cannot start again"):
            group.restart_failed_workers()
        wait_until_published(group)
        for one in (handle, pickle.loads(pickle.dumps(handle))):
            assert [worker.state for worker in one.status()] == ["idle", "dead"]
            with pytest.raises(WorkerFailureError) as raised:
                one.call("pid").result()
            (failure,) = raised.value.failures
            assert (failure.rank, failure.kind) == (1, "killed")
            assert "not started yet" not in failure.cause
        obstacle.unlink()
        assert group.restart_failed_workers() == [1]
        wait_until_published(group)
        assert handle.call("pid").result() == group.call("pid").result()


def test_resize(local_ray):
    """A handle and its views follow a resize of the group: the next call reaches the new workers."""
    with (
        RayVirtualCluster([3], use_gpus=False) as cluster,
        RayWorkerGroup(cluster.slots()[:2], Worker, sharding_annotations=NamedSharding.from_shape(dp=2)) as group,
    ):
        handle = group.handle()
        view = handle.at(dp=slice(1, None))
        assert len(handle.call("pid").result()) == 2
        group.resize(dp=3, slots=cluster.slots()[2:])
        wait_until_published(group)
        assert len(handle.call("pid").result()) == 3
        assert handle.call("add", Shard([1, 2, 3], "dp")).result() == [(0, 1), (1, 2), (2, 3)]
        assert view.call("square", 3).result() == [9, 9]
        assert handle.sharding_annotations.shape == {"dp": 3}
        assert handle.group_epoch == group.state().group_epoch
        last = handle.at(dp=2)
        group.resize(dp=2)
        wait_until_published(group)
        assert len(handle.call("pid").result()) == 2
        with pytest.raises(StaleGroupError, match="'dp': 2"):
            last.call("pid")


OWNER = """
    import os, sys
    import ray
    from fairlead_placement import RayVirtualCluster
    from fairlead_workergroup import RayWorkerGroup

    class Worker:
        def pid(self):
            return os.getpid()

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        group = RayWorkerGroup(cluster, Worker, name_prefix="critic")
        print(ray.get_runtime_context().gcs_address, flush=True)
        input()
        group.shutdown()
        print("ended", flush=True)
        input()
"""
CLIENT = """
    import pickle, sys, time
    import ray
    from fairlead_placement import PlacementError
    from fairlead_placement.extension import find_boards
    from fairlead_workergroup import WorkerGroupError, attach

    try:
        handle = attach("critic", sys.argv[1])
    except PlacementError as error:
        print(type(error).__name__)
        sys.exit()
    handle = pickle.loads(pickle.dumps(handle))
    print(len(handle.call("pid").result()), [one.state for one in handle.status()], flush=True)
    input()
    for board in find_boards():
        ray.kill(board.handle)
    fresh = pickle.loads(pickle.dumps(handle))  # which has not called the group before
    print(len(fresh.call("pid").result()), len(handle.call("pid").result()), flush=True)
    input()
    while True:  # withdrawals are not waited for
        try:
            attach("critic")
        except WorkerGroupError as error:
            if str(error).startswith("No worker group is registered"):
                break
        time.sleep(0.05)
    for what in (lambda: handle.call("pid"), handle.status, lambda: attach("critic")):
        try:
            what()
        except WorkerGroupError as error:
            print(error, flush=True)
"""


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a script in a process of its own."""
    started = []

    def start_script(source, *arguments, **env):
        command = [sys.executable, "-c", textwrap.dedent(source), *arguments]
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **env}, **options))
        return started[-1]

    yield start_script
    for process in started:
        process.kill()
        process.communicate()


def go_on(process):
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.nightly
def test_owner_that_is_stopped(start):
    """Another driver calls the group while its owner is stopped; it needs the token.

    It finds the group again when the node's agent has died, and learns of the group's end.
    """
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 20}
    owner = start(OWNER, **token)
    address = owner.stdout.readline().strip()
    wrong = start(CLIENT, address, **{**token, "RAY_AUTH_TOKEN": "cd" * 20})
    assert wrong.communicate(timeout=120)[0].strip() == "PlacementError"
    os.kill(owner.pid, signal.SIGSTOP)
    while Path(f"/proc/{owner.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    client = start(CLIENT, address, **token)
    assert client.stdout.readline().strip() == "2 ['idle', 'idle']"
    os.kill(owner.pid, signal.SIGCONT)
    go_on(client)
    assert client.stdout.readline().strip() == "2 2"  # the owner has published the group at another agent
    go_on(owner)
    assert owner.stdout.readline().strip() == "ended"
    go_on(client)
    ended = "has ended: it was shut down, or the process that made it has ended."
    for _ in range(2):
        line = client.stdout.readline().strip()
        assert line.startswith("The group 'critic' (")
        assert line.endswith(ended)
    assert client.stdout.readline().strip() == "No worker group is registered on this cluster."
    go_on(owner)
