# SPDX-License-Identifier: Apache-2.0
"""Lost workers are started again: the same ranks, the same slots, the same arguments."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_workergroup import (
    CallCancelledError,
    CallTimeoutError,
    RayWorkerBuilder,
    RayWorkerGroup,
    Shard,
    WorkerFailure,
    WorkerFailureError,
    WorkerGroupError,
    current_worker,
)
from fairlead_workergroup._observe import observer as _watching
from fairlead_workergroup._observe.failures import Verdicts
from fairlead_workergroup._ray_private import how_it_ended
from fairlead_workergroup.testing import kill

from ..calling import MB, store_used

AXES = NamedSharding.from_shape(dp=2, tp=2)


class Worker:
    """Knows what it was made from and what has happened to it."""

    def __init__(self, value=None, fail_again=()):
        worker = current_worker()
        if worker.incarnation and worker.rank in fail_again:
            raise OSError("cannot start a second time")
        self.value = value
        self.loaded = None

    def load(self):
        self.loaded = current_worker().incarnation

    def slowly_load(self):
        time.sleep(3)

    def load_when_open(self):
        while not os.path.exists(os.environ["GATE"]):
            time.sleep(0.02)

    def fail_to_load(self):
        raise OSError("no checkpoint")

    def note(self, value):
        self.noted = [*getattr(self, "noted", []), value]

    def what_was_noted(self):
        return self.noted

    def raise_nothing(self):
        pass

    def state_of(self, item):
        return self.state()

    def state(self):
        worker = current_worker()
        return worker.rank, worker.incarnation, self.loaded, float(np.sum(self.value)), os.environ["MASTER_PORT"]

    def pid(self):
        return os.getpid()

    def double(self, data, die_at=(), until=1):
        worker = current_worker()
        if worker.rank in die_at and worker.incarnation < until:
            os._exit(1)
        return data * 2

    def die(self, ranks):
        if current_worker().rank in ranks:
            os._exit(1)

    def count(self, n, die_at=()):
        for i in range(n):
            if i == 1 and current_worker().rank in die_at and not current_worker().incarnation:
                os._exit(1)
            yield i

    def die_once(self, pair):
        item, path = pair
        if item == 5 and not path.exists():
            path.touch()
            os._exit(1)
        return item

    def fail_with(self, rank, pid):
        if current_worker().rank == rank:
            os._exit(1)
        if current_worker().rank == 0:
            while "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:  # it is gone, or nearly
                pass
            raise ConnectionError("my peer has gone")
        time.sleep(20)

    def raise_error(self):
        raise ValueError("mine")

    def raise_loss(self):
        raise WorkerFailureError((), "of a group of mine")

    def map_until_ask_nodes(self, block):
        """Have all pages of a large value resident for several looks of the guard."""
        total = int(block.sum())
        time.sleep(1.0)
        return total

    def start_child(self, size):
        code = f"block = b'x' * {size}; import time; time.sleep(60)"
        subprocess.run([sys.executable, "-c", code], check=True)

    def grow(self, size):
        self.block = np.ones(size // 8)
        time.sleep(30)


class Configured:
    """Gets an argument of 8 MB that it was not given."""

    def __init__(self, block):
        self.block = block

    @staticmethod
    def configure_worker(num_gpus, bundle_indices):
        return {}, {}, {"block": np.ones(MB)}

    def total(self):
        return int(self.block.sum())


VALUE = np.ones(20_000)


@pytest.fixture
def made(local_ray) -> Iterator:
    """Makes groups of four workers; all are shut down in the end."""
    groups = []
    with RayVirtualCluster([4], use_gpus=False) as cluster:

        def make(*args, **options):
            for group in groups:
                assert group.shutdown()
            builder = RayWorkerBuilder(Worker, *(args or (VALUE,)))
            groups.append(RayWorkerGroup(cluster, builder, sharding_annotations=AXES, **options))
            return groups[-1]

        yield make
        for group in groups:
            assert group.shutdown()


def is_restarting(group):
    return any(worker["state"] == "restarting" for worker in group.worker_metadata)


def die(group, *ranks):
    """End workers from inside, and wait until a call has met it."""
    call = group.call("die", ranks)
    assert call.wait(timeout=60)
    with pytest.raises(WorkerFailureError) as caught:
        call.result()
    assert [failure.rank for failure in caught.value.failures] == list(ranks)


def test_the_same_rank_again(made):
    """Same arguments, which are stored once and for all; a new process; incarnation + 1; the others are not touched."""
    group = made()
    pids, puts = group.call("pid").result(), group.statistics().puts
    die(group, 1)
    assert group.worker_metadata[1]["state"] == "dead"
    assert group.restart_failed_workers() == [1]
    assert group.worker_metadata[1]["state"] == "alive"
    port = str(group.master_port)
    assert group.call("state").result() == [(rank, int(rank == 1), None, 20_000.0, port) for rank in range(4)]
    assert group.statistics().puts == puts
    now = group.call("pid").result()
    assert [rank for rank in range(4) if now[rank] != pids[rank]] == [1]
    assert group.restart_failed_workers() == []


def test_nothing_is_kept_of_earlier_starts(local_ray, eventually):
    """What `configure_worker` adds is stored for each start, and for no longer than somebody uses it."""
    with RayVirtualCluster([1], use_gpus=False) as cluster, RayWorkerGroup(cluster, Configured) as group:
        assert 8 * MB <= store_used() < 9 * MB
        for _ in range(2):
            kill(group, 0)
            assert eventually(lambda: group.restart_failed_workers() == [0])  # once Ray knows
            assert group.call("total").result() == [MB]
        assert eventually(lambda: gc.collect() >= 0 and store_used() < 9 * MB)


@pytest.mark.parametrize("explained", [True, False])
def test_a_death_that_no_call_has_met(made, monkeypatch, explained):
    """restart_failed_workers asks Ray who is dead, whether or not Ray says of what."""
    if not explained:
        monkeypatch.setattr(Verdicts, "note_causes", lambda verdicts, dead, within_s: None)
    group = made()
    os.kill(group.call("pid").result()[3], signal.SIGKILL)
    deadline = time.monotonic() + 30
    while not (ranks := group.restart_failed_workers()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ranks == [3]
    assert group.call("state").result()[3][1] == 1


def test_the_whole_group(made):
    """Scope "group": all start again, on a new master port, and all reload."""
    group = made(restart_scope="group", on_restart="load")
    port = group.master_port
    die(group, 2)
    assert group.restart_failed_workers() == [0, 1, 2, 3]
    assert group.master_port != port
    assert group.call("state").result() == [(rank, 1, 1, 20_000.0, str(group.master_port)) for rank in range(4)]


def test_any_call_restarts_the_whole_group(made):
    """With scope "group" nothing runs beside a lost rank: views that lack it and `map` restart the group too."""
    group = made(restart_on_failure=True, restart_scope="group")
    with pytest.raises(WorkerFailureError, match="The next call restarts the whole group first"):
        group.call("die", [3]).result()
    assert [state[1] for state in group.at(dp=0).call("state").result()] == [1, 1]
    die(group, 3)
    assert next(group.map("state_of", [0]))[1] == 2
    assert [state[1] for state in group.call("state").result()] == [2] * 4


@pytest.mark.parametrize("scope", ["worker", "group"])
def test_map_goes_on_after_a_loss(made, tmp_path, scope):
    """Items of a worker that died go to the others; with scope "group" all of them restart, and take part again."""
    group = made(restart_on_failure=True, restart_scope=scope, enable_load_balancing=True, max_restarts=1)
    assert list(group.map("die_once", [(item, tmp_path / "died") for item in range(20)])) == list(range(20))
    incarnations = [state[1] for state in group.call("state").result()]
    assert sorted(incarnations) == ([0, 0, 0, 1] if scope == "worker" else [1] * 4)


def test_what_to_do_by_default():
    """The error names the method that starts lost workers again."""
    error = WorkerFailureError((WorkerFailure(1, "killed", cause="it was killed"),))
    assert str(error).splitlines()[-1] == (
        "Look at the logs of these workers. `restart_failed_workers()` starts them again."
    )


@pytest.mark.parametrize("bare", [True, False])
def test_a_cluster_that_was_shut_down(local_ray, bare):
    """Calls and restarts say that the cluster is gone, instead of a restart that waits for ever."""
    cluster = RayVirtualCluster([1], use_gpus=False)
    place = cluster.slots() if bare else cluster
    with RayWorkerGroup(place, Worker, restart_on_failure=True, start_timeout_s=60) as group:
        cluster.shutdown()
        call = group.call("pid")
        for asks in (call.result, lambda: group.call("pid"), group.restart_failed_workers):
            with pytest.raises(WorkerFailureError, match="The cluster of this group has been shut down") as caught:
                asks()
            assert "make a new group" in caught.value.remedy


def test_before_the_next_call(made):
    """With restart_on_failure the call that met it raises, and says so; the next one works, classic ones too."""
    group = made(restart_on_failure=True, on_restart="load")
    with pytest.raises(WorkerFailureError, match=r"next call that reaches rank\(s\) [03, ]+ starts them again"):
        group.call("die", [0, 3]).result()
    assert group.call("double", Shard([1, 2], "dp"), retries=1).result() == [2, 2, 4, 4]
    assert [state[1] for state in group.call("state").result()] == [1, 0, 0, 1]
    die(group, 1)
    assert group.get_all_worker_results(group.run_all_workers_single_data("double", 4)) == [8] * 4


def test_retries(made):
    """With retries the call itself is repeated, on those that were lost only, also when it is awaited or streams."""
    group = made(restart_on_failure=True, on_restart="load", max_restarts=5)
    big = np.ones(20_000)
    requests = group.statistics().requests
    call = group.call("double", Shard([big, big], "dp"), die_at=[1], retries=1, collect="tp")
    assert [float(value[0]) for value in call.result()] == [2.0, 2.0]
    # 4 of the call, 1 start, 1 on_restart, 1 again.
    assert group.statistics().requests - requests == 7
    assert call.statistics().puts == 1
    assert [state[1] for state in group.call("state").result()] == [0, 1, 0, 0]

    async def awaited():
        return await group.call("double", 3, die_at=[2], retries=2)

    assert asyncio.run(awaited()) == [6] * 4
    assert group.call("count", 3, die_at=[3], retries=1).result() == [[0, 1, 2]] * 4
    with pytest.raises(WorkerFailureError):
        group.call("double", 3, die_at=[0], until=9, retries=1).result()
    with pytest.raises(ValueError, match="mine"):
        group.call("raise_error", retries=3).result()


def test_a_death_is_not_taken_for_what_it_causes(made):
    """A peer that fails because a worker died may be heard of first; it is the death that is raised, and repeated."""
    group = made()
    for incarnation in range(3):
        pid = group.call("pid").result()[2]
        with pytest.raises(WorkerFailureError, match="rank 2"):
            group.at(dp=slice(0, 2), tp=0).call("fail_with", 2, pid).result()
        assert group.restart_failed_workers() == [2]
        assert group.call("state").result()[2][1] == incarnation + 1


def test_retries_of_a_whole_group(made):
    """Scope "group": everybody does it again."""
    group = made(restart_on_failure=True, restart_scope="group")
    assert group.call("double", 3, die_at=[2], retries=1).result() == [6] * 4
    assert [state[1] for state in group.call("state").result()] == [1] * 4


@pytest.mark.parametrize("scope", ["worker", "group"])
def test_retries_while_several_wait(made, scope):
    """A call whose result two threads wait for is repeated once, and costs one of its retries."""
    group = made(restart_on_failure=True, restart_scope=scope)
    call = group.call("double", 3, die_at=[1], retries=1)
    before = group.statistics().requests
    with ThreadPoolExecutor() as pool:
        results = [pool.submit(call.result) for _ in range(2)]
        assert [result.result(timeout=120) for result in results] == [[6] * 4] * 2
    started_and_repeated = 2 if scope == "worker" else 8
    assert group.statistics().requests - before == started_and_repeated


def test_a_loss_that_a_worker_tells_of(made):
    """The error of a worker that has lost workers of its own is not taken for its loss: nothing is repeated."""
    group = made(restart_on_failure=True, restart_scope="group")
    call = group.call("raise_loss", retries=2)
    with pytest.raises(WorkerFailureError, match="of a group of mine"):
        call.result()
    assert group.call("state").result()[0][1] == 0
    assert call.statistics().requests == 4
    assert group.statistics().requests == 12  # starts, this call, and the last one


def test_a_look_during_a_restart(made, monkeypatch):
    """What is told of a worker is of one of its lives."""
    group = made()
    die(group, 1)
    pid = group.get_worker_status()[1].pid
    ask = _watching.ask_nodes

    def restart_meanwhile(*args):
        group.restart_failed_workers()
        return ask(*args)

    with monkeypatch.context() as patched:
        patched.setattr(_watching, "ask_nodes", restart_meanwhile)
        before = group.get_worker_status()[1]
    assert (before.pid, before.state, before.incarnation, before.restarts) == (pid, "dead", 0, 0)
    assert group.worker_metadata[1]["state"] == "alive"
    now = group.get_worker_status()[1]
    assert (now.pid != pid, now.state, now.incarnation, now.restarts) == (True, "idle", 1, 1)


def test_max_restarts(made):
    """Per rank for scope worker; used up, it says so, and nothing is started."""
    group = made(max_restarts=1)
    for rank in (1, 2):
        die(group, rank)
        assert group.restart_failed_workers() == [rank]
    die(group, 1)
    with pytest.raises(WorkerFailureError, match="rank 1 has been restarted max_restarts=1 times"):
        group.restart_failed_workers()
    with pytest.raises(WorkerFailureError, match="rank 1 has been restarted max_restarts=1 times"):
        group.call("pid")
    group = made(max_restarts=0, restart_scope="group", restart_on_failure=True)
    die(group, 0)
    with pytest.raises(WorkerFailureError, match="the group has been restarted max_restarts=0 times"):
        group.call("pid")


def test_a_start_that_fails(made):
    """Kind "start-failed" with the reason; the others work on; it can be tried again until max_restarts."""
    group = made(VALUE, [2])
    die(group, 2)
    for _ in range(3):
        with pytest.raises(WorkerFailureError, match="cannot start a second time") as caught:
            group.restart_failed_workers()
        assert [(failure.rank, failure.kind) for failure in caught.value.failures] == [(2, "start-failed")]
    with pytest.raises(WorkerFailureError, match="max_restarts=3"):
        group.restart_failed_workers()
    assert group.at(dp=0).call("double", 1).result() == [2, 2]
    group = made(on_restart="fail_to_load")
    die(group, 0)
    with pytest.raises(WorkerFailureError, match="no checkpoint"):
        group.restart_failed_workers()
    with pytest.raises(WorkerFailureError, match="rank 0"):
        group.call("pid")


def test_shut_down_while_it_restarts(made):
    """What another thread was starting is ended too, and nothing of it is left; no call brings the group back."""
    group = made(restart_on_failure=True, on_restart="slowly_load")
    die(group, 1)
    with ThreadPoolExecutor() as pool:
        call = pool.submit(group.call, "pid")
        while not is_restarting(group):
            time.sleep(0.01)
        time.sleep(1.0)
        group.shutdown()
        with pytest.raises((WorkerGroupError, WorkerFailureError)):
            call.result(timeout=60)
    assert group.workers == []
    with pytest.raises(WorkerGroupError, match="it has been shut down"):
        group.call("pid")


def test_a_deadline_covers_a_restart(made, tmp_path, eventually):
    """A call waits for a restart until its deadline, says so and sends nothing; the restart goes on."""
    gate = tmp_path / "gate"
    group = made(restart_on_failure=True, on_restart="load_when_open", env_vars={"GATE": str(gate)})
    die(group, 1)
    with pytest.raises(CallTimeoutError, match="'pid' was not sent to its 4 workers"):
        group.call("pid", timeout=0.2)
    assert eventually(lambda: is_restarting(group))
    for view in (group, group.at(dp=1)):
        with pytest.raises(
            CallTimeoutError, match=r"A restart of rank\(s\) 1 has been under way for .* goes on"
        ) as caught:
            view.call("pid", timeout=0.2)
        assert caught.value.late == ()
    gate.touch()
    assert [state[1] for state in group.call("state", timeout=120).result()] == [0, 1, 0, 0]
    assert group.call("pid").statistics().requests == 4


def test_an_event_loop_runs_on_during_a_restart(made, tmp_path, eventually):
    """Calls that a coroutine makes wait for a restart without blocking its loop, and are sent in their order."""
    gate = tmp_path / "gate"
    group = made(restart_on_failure=True, on_restart="load_when_open", env_vars={"GATE": str(gate)})
    die(group, 1)

    async def main():
        began = time.monotonic()
        waiting = [group.call("double", VALUE), group.call("note", config := {"lr": 1}), group.call("what_was_noted")]
        given_up, withdrawn, late = group.call("note", 2), group.call("note", 3), group.call("note", 4, timeout=0.3)
        items = group.call("count", 2)
        config["lr"] = 2
        assert time.monotonic() - began < 1.0
        assert repr(waiting[0]) == "Call('double', waits to be sent, 4 results)"
        assert "not sent" in waiting[0]._repr_html_()
        assert not waiting[0].done()
        assert waiting[0].statistics().requests == 4
        assert withdrawn.cancel() == []
        assert withdrawn.done()
        with pytest.raises(CallCancelledError):
            await withdrawn
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await given_up
        with pytest.raises(CallTimeoutError, match="'note' was not sent to its 4 workers"):
            await late
        mapped = group.map("state_of", range(3))
        first = asyncio.create_task(anext(mapped))
        streamed = asyncio.create_task(anext(items.stream()))
        gathered = asyncio.gather(*waiting)
        with ThreadPoolExecutor() as threads:
            assert await asyncio.get_running_loop().run_in_executor(threads, eventually, lambda: is_restarting(group))
        assert not group.call("pid").done()
        gate.touch()
        doubled, _, noted = await asyncio.wait_for(gathered, 120)
        assert [float(value[0]) for value in doubled] == [2.0] * 4
        assert noted == [[{"lr": 1}]] * 4
        assert (await streamed).value == 0
        assert [(await first)[1], *[state[1] async for state in mapped]] == [0, 1, 0]
        assert [outcome.value async for outcome in group.call("raise_nothing")] == [None] * 4
        return given_up, late

    given_up, late = asyncio.run(main())
    for call, error in ((given_up, CallCancelledError), (late, CallTimeoutError)):
        state = "cancelled" if error is CallCancelledError else "could not be sent"
        assert repr(call) == f"Call('note', {state}, 4 results)"
        for ask in (call.result, call.wait, call.outcomes, lambda call=call: list(call), lambda call=call: call.refs):
            with pytest.raises(error):
                ask()
    assert group.call("what_was_noted").result() == [[{"lr": 1}]] * 4


def test_a_restart_that_fails_under_an_event_loop(made):
    """Who waits for the call learns why it was not sent; a call of another group is not held up."""
    group = made((), [1], restart_on_failure=True)
    die(group, 1)

    async def main():
        call = group.call("pid", retries=1)
        with pytest.raises(WorkerFailureError, match="cannot start a second time"):
            await call
        with pytest.raises(WorkerFailureError, match="cannot start a second time"):
            call.result()
        assert call.done()
        assert call.cancel() == []

    asyncio.run(main())


def test_on_restart_has_time(made):
    """Reloading has the time of a start, not of a call."""
    group = made(restart_on_failure=True, on_restart="slowly_load", call_timeout_s=1.0)
    die(group, 1)
    assert group.restart_failed_workers() == [1]


def test_two_groups(made, local_ray):
    """One group's loss, restart and end do not touch the other."""
    with RayVirtualCluster([2], use_gpus=False) as cluster, RayWorkerGroup(cluster, Worker, max_restarts=1) as other:
        ours = made(restart_on_failure=True)
        pids = other.call("pid").result()
        pending = other.call("double", 4)
        die(ours, 0, 1, 2, 3)
        assert ours.call("double", 2).result() == [4] * 4
        ours.shutdown()
        assert (pending.result(), other.call("pid").result()) == ([8, 8], pids)


def test_cancelled_with_force_and_started_again(made):
    """What was ended by cancel(force=True) is lost like any other, and comes back."""
    group = made(restart_on_failure=True)
    call = group.at(dp=0, tp=0).call("grow", 8)
    time.sleep(0.3)
    assert call.cancel(force=True) == [0]
    assert group.call("double", 1).result() == [2] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_restarts": -1}, "max_restarts must be a whole number"),
        ({"max_restarts": 1.5}, "max_restarts must be a whole number"),
        ({"restart_scope": "node"}, "restart_scope is 'worker' or 'group', got 'node'"),
        ({"memory_limit": "lots"}, "a memory limit is a positive number of bytes"),
        ({"memory_limit": 0}, "a memory limit is a positive number of bytes"),
        ({"memory_limit": True}, "a memory limit is a positive number of bytes"),
        ({"memory_limit": "8 apples"}, "a memory limit is a positive number of bytes"),
    ],
)
def test_bad_options(made, options, message):
    """Refused before anything starts."""
    with pytest.raises(ValueError, match=message):
        made(**options)


def test_bad_methods_and_retries(made):
    """An on_restart that is not there is refused with a list; retries need a group that restarts."""
    with pytest.raises(AttributeError, match="Worker has no public method 'reload'"):
        made(on_restart="reload")
    group = made()
    with pytest.raises(ValueError, match="needs a group with restart_on_failure=True"):
        group.call("pid", retries=1)
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match="retries must be a whole number"):
            group.call("pid", retries=wrong)


def test_memory_limit(made):
    """A worker that passes it is ended, with both numbers; the others and the next incarnation are watched on."""
    group = made(restart_on_failure=True, memory_limit="600MB")
    for incarnation in (1, 2):
        with pytest.raises(WorkerFailureError) as caught:
            group.at(dp=1, tp=0).call("grow", 800_000_000).result()
        (failure,) = caught.value.failures
        assert (failure.rank, failure.kind) == (2, "out-of-memory")
        assert "memory_limit of 600,000,000 bytes" in failure.cause
        assert int(failure.cause.split(" held ")[1].split(" bytes")[0].replace(",", "")) > 600_000_000
        assert group.call("state").result()[2][1] == incarnation


def test_memory_that_counts(made):
    """Values in the object store do not count for a worker that maps them; what its children hold does."""
    group = made(restart_on_failure=True, memory_limit="300MB")
    assert group.at(dp=1, tp=0).call("map_until_ask_nodes", np.ones(50 * MB)).result() == [50 * MB]
    with pytest.raises(WorkerFailureError) as caught:
        group.at(dp=1, tp=0).call("start_child", 400_000_000).result()
    (failure,) = caught.value.failures
    assert (failure.rank, failure.kind) == (2, "out-of-memory")


def test_slots_of_two_clusters(local_ray):
    """Slots that have the same numbers, each in its own cluster, are different ones."""
    with (
        RayVirtualCluster([1], use_gpus=False) as one,
        RayVirtualCluster([1], use_gpus=False) as other,
        RayWorkerGroup([*one.slots(), *other.slots()], Worker) as group,
    ):
        before = group.call("pid").result()
        die(group, 0)
        assert group.restart_failed_workers() == [0]
        assert [now == pid for now, pid in zip(group.call("pid").result(), before, strict=True)] == [False, True]


def test_bare_slots(local_ray):
    """A group made from slots restarts in place as any other."""
    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(cluster.slots(), Worker, restart_on_failure=True) as group,
    ):
        die(group, 1)
        assert group.call("double", 5).result() == [10, 10]
        assert ray.get(group.workers[1].double.remote(1)) == 2


def test_how_a_worker_ended(doomed: RayWorkerGroup) -> None:
    """The failure says with which code or by which signal a worker ended, where Ray knows; else it says neither."""

    def end(worker: object, how: str) -> None:
        if how == "exit":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGTERM if how == "terminate" else signal.SIGKILL)
        time.sleep(60)

    ended = []
    for rank, how in enumerate(("exit", "terminate", "kill")):
        with pytest.raises(WorkerFailureError) as caught:
            doomed.at(dp=rank // 2, tp=rank % 2).call(end, how, timeout=60).result()
        (failure,) = caught.value.failures
        ended.append((failure.exit_code, failure.signal))
        assert ("exit code 3" in str(failure), "SIGTERM" in str(failure)) == (how == "exit", how == "terminate")
    assert ended == [(3, None), (None, signal.SIGTERM), (None, None)]


def test_how_a_worker_ended_without_the_words() -> None:
    """Without the words of this version of Ray neither is known, and what the worker printed is no such word."""
    assert how_it_ended(RuntimeError("The actor died.")) == (None, None)
    assert how_it_ended(RuntimeError("It died.\nLast log: Worker exits with an exit code 4")) == (None, None)
