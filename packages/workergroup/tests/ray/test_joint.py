# SPDX-License-Identifier: Apache-2.0
"""Calls of the workers of several groups together."""

import asyncio
import contextlib
import os
import sys
import threading
import time
from dataclasses import replace

import pytest

from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_workergroup import (
    CallCancelledError,
    CallTimeoutError,
    EpochError,
    PerWorker,
    RayWorkerBuilder,
    RayWorkerGroup,
    Restart,
    Shard,
    WorkerFailureError,
    WorkerGroupError,
    join,
)
from fairlead_workergroup.spi import start_tick
from fairlead_workergroup.testing import kill

pytestmark = pytest.mark.nightly

DP = NamedSharding.from_shape(dp=2)


class Trainer:
    def __init__(self, name="trainer"):
        self.rank, self.name = int(os.environ["RANK"]), name
        self.log = []

    def who(self, *values):
        self.log += values
        return self.name, self.rank, *values

    def read_log(self):
        return self.log

    def wait_for(self, path, group="", rank=0):
        while (not group or (self.name, self.rank) == (group, rank)) and not os.path.exists(path):
            time.sleep(0.01)
        return self.rank

    def die(self, group, rank):
        if (self.name, self.rank) == (group, rank):
            os._exit(3)
        time.sleep(600)

    def die_once(self, path):
        if (self.name, self.rank) == ("rollouts", 1) and os.path.exists(path):
            os.unlink(path)
            os._exit(3)
        self.log.append(1)
        return self.rank

    def lose_peer(self, pid):
        if pid == os.getpid():
            os._exit(3)
        if self.name == "trainer":
            time.sleep(600)
        while start_tick(pid) >= 0:
            time.sleep(0.01)
        raise ConnectionError("the peer is gone")

    def fail(self, group, rank, path=""):
        if (self.name, self.rank) == (group, rank):
            raise KeyError(group)
        while path and not os.path.exists(path):
            time.sleep(0.01)

    def items(self):
        yield self.rank

    def train(self):
        return "trained"


class Rollout(Trainer):
    """Another class with some methods of the same names."""

    def who(self, *values):
        self.log += values
        return "a rollout", self.rank, *values

    train = None


@pytest.fixture(scope="module")
def groups(local_ray):
    with RayVirtualCluster([4], use_gpus=False) as cluster:
        slots = cluster.slots()
        with (
            RayWorkerGroup(
                slots[:2], RayWorkerBuilder(Trainer, "trainer"), [2], "trainer", sharding_annotations=DP
            ) as a,
            RayWorkerGroup(slots[2:], RayWorkerBuilder(Rollout, "rollouts"), [2], "rollouts") as b,
        ):
            yield a, b


@pytest.fixture
def doomed(local_ray, request):
    """Yield two groups of two workers each; the second one restarts lost workers."""
    restart, first = Restart(on_failure=True), getattr(request, "param", None)
    with RayVirtualCluster([4], use_gpus=False) as cluster:
        slots = cluster.slots()
        with (
            RayWorkerGroup(slots[:2], RayWorkerBuilder(Trainer, "trainer"), [2], "trainer", restart=first) as a,
            RayWorkerGroup(slots[2:], RayWorkerBuilder(Trainer, "rollouts"), [2], "rollouts", restart=restart) as b,
        ):
            yield a, b


def test_results_in_the_order_of_the_parts(groups):
    """One list has the results of all parts, each by rank; a view and a handle are parts like a group."""
    trainer, rollouts = groups
    assert join(trainer, rollouts).call("who").result() == [
        ("trainer", 0),
        ("trainer", 1),
        ("a rollout", 0),
        ("a rollout", 1),
    ]
    some = join(rollouts.handle().at(worker=1), trainer.at(dp=0))
    assert some.call("who", 5).result() == [("a rollout", 1, 5), ("trainer", 0, 5)]
    assert some.with_options(timeout=30.0).call("who").result() == [("a rollout", 1), ("trainer", 0)]
    assert some.call("who", discard=True).result() is None
    assert join(rollouts, trainer).call(lambda worker, plus: worker.rank + plus, 10).result() == [10, 11, 10, 11]
    assert join(trainer.at(dp=0), rollouts, trainer.at(dp=1)).call("who", collect=None).result()[-1] == ("trainer", 1)


def test_arguments(groups):
    """`PerWorker` has a value for each worker of all parts, also those of a call; `Shard` splits in each part."""
    both = join(*groups)
    first = both.call("who", PerWorker([1, 2, 3, 4]))
    assert [values[-1] for values in first.result()] == [1, 2, 3, 4]
    assert both.call("who", PerWorker(first)).result()[3] == ("a rollout", 1, ("a rollout", 1, 4))
    assert groups[0].at(dp=0).call("who", first, collect=()).result()[2] == first.result()
    with pytest.raises(ValueError, match="3 values, but 4 workers are called"):
        both.call("who", PerWorker([1, 2, 3]))
    with pytest.raises(ValueError, match=r"sizes \[2, None\] along 'dp'.*Use PerWorker"):
        both.call("who", Shard([1, 2], "dp"))
    trainers = join(groups[0].at(dp=slice(0, 1)), groups[0].at(dp=slice(1, 2)))
    assert trainers.call("who", Shard(["x"], "dp")).result() == [("trainer", 0, "x"), ("trainer", 1, "x")]


def test_a_part_that_refuses(groups, tmp_path):
    """If a part refuses the call, no worker of any part runs it, and the error names the group."""
    trainer, rollouts = groups
    trainer.call(lambda worker: worker.log.clear()).result()
    both = join(trainer, rollouts)
    with pytest.raises(AttributeError, match="no public method 'train'") as missing:
        both.call("train")
    assert missing.value.__notes__ == ["in group 'rollouts'"]
    with pytest.raises(TypeError, match="generator"):
        both.call("items")
    with pytest.raises(ValueError, match="collect=\\(\\)"):
        both.call("who", collect=())
    with pytest.raises(ValueError, match="retries=1 needs a group") as refused:
        both.call("who", 1, retries=1)
    assert refused.value.__notes__ == ["in group 'trainer'"]
    with pytest.raises(TypeError, match="method in some groups only"):
        both.call(Rollout.who, 1)
    with pytest.raises(ValueError, match="Invalid axis name: 'dp'"):
        both.with_options(collect="dp")
    assert trainer.call("read_log").result() == [[], []]


def test_parts_that_cannot_be_joined(groups):
    """Parts that are no workers, whose groups have one name, or that share workers are refused."""
    trainer, rollouts = groups
    with pytest.raises(TypeError, match="join takes groups, handles and views"):
        join(trainer, "rollouts")
    for parts in [(), (trainer, trainer.handle())]:
        with pytest.raises(ValueError, match="groups with different names"):
            join(*parts)
    with pytest.raises(ValueError, match="Join views without options"):
        join(trainer, rollouts.with_options(timeout=1.0))
    with pytest.raises(ValueError, match=r"ranks \[1\] are in two parts"):
        join(trainer, rollouts, trainer.at(dp=1)).call("who")


def test_deadline(groups, tmp_path, eventually):
    """One deadline holds for all parts; the error names the late workers with their groups, and nothing is lost."""
    path, never = tmp_path / "open", tmp_path / "never"

    def waits_for(trainers, rollouts):
        done = f"'trainer' {trainers} of 2 workers done, 'rollouts' {rollouts} of 2 workers done"
        return lambda: done in repr(call)

    call = join(*groups).call("wait_for", str(path), group="rollouts", rank=1, timeout=600.0)
    assert eventually(waits_for(2, 1))
    with pytest.raises(CallTimeoutError, match="1 of 4 workers have not finished") as late:
        call.result(timeout=0.1)
    assert [(one.group, one.rank, one.method) for one in late.value.late] == [("rollouts", 1, "wait_for")]
    assert "rank 1 (worker=1) of 'rollouts' on node" in str(late.value)
    assert (call.done(), call.wait(timeout=0.1)) == (False, False)
    assert repr(call) == "JoinedCall('wait_for', 'trainer' 2 of 2 workers done, 'rollouts' 1 of 2 workers done)"
    outcomes = call.outcomes(timeout=0.1)
    assert [(one.group, one.rank, one.value) for one in outcomes[:3]] == [
        ("trainer", 0, 0),
        ("trainer", 1, 1),
        ("rollouts", 0, 0),
    ]
    assert outcomes[3].error.late[0].group == "rollouts"
    iterated = iter(call)
    assert {(one.group, one.rank) for one in [next(iterated) for _ in range(3)]} == {
        ("trainer", 0),
        ("trainer", 1),
        ("rollouts", 0),
    }
    path.touch()
    assert next(iterated).group == "rollouts"
    assert (call.result(), call.wait(), call.done()) == ([0, 1, 0, 1], True, True)
    call = join(*groups).call(lambda worker, path: worker.rank and worker.wait_for(path), str(never), timeout=0.1)
    try:
        assert eventually(waits_for(1, 1))
        with pytest.raises(CallTimeoutError, match="2 of 4"):
            call.result()
    finally:
        never.touch()


def test_an_error_of_a_worker(groups, tmp_path):
    """The exception of a worker is raised while others run, with its type, and names the worker and the group."""
    path = tmp_path / "open"
    call = join(*groups).call("fail", "rollouts", 1, str(path))
    with pytest.raises(KeyError) as failed:
        call.result()
    assert not call.done()
    path.touch()
    assert "raised by rank 1 (worker=1)" in failed.value.__notes__[0]
    assert failed.value.__notes__[1:] == ["in group 'rollouts'"]
    outcomes = join(*groups).call("fail", "rollouts", 1, str(path)).outcomes()
    assert [type(one.error) for one in outcomes] == [type(None)] * 3 + [KeyError]


def test_await_and_cancel(groups, tmp_path, eventually):
    """`await` leaves the event loop to others, and its cancellation cancels the call of all parts."""
    both, path = join(*groups), tmp_path / "open"

    async def run():
        call = both.call("wait_for", str(path), group="rollouts", rank=0)
        waiting = asyncio.ensure_future(call._wait_on_loop())
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert not waiting.done()
        path.touch()
        assert await waiting == [0, 1, 0, 1]
        assert {one.group async for one in call} == {"trainer", "rollouts"}
        path.unlink()
        first, second = both.call("wait_for", str(path)), both.call("who", 7)
        task = asyncio.ensure_future(second._wait_on_loop())
        await asyncio.sleep(0.1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        path.touch()
        assert await first == [0, 1, 0, 1]
        return second

    second = asyncio.run(run())
    with pytest.raises(CallCancelledError, match="cancelled before rank\\(s\\) 0, 1") as cancelled:
        second.result()
    assert cancelled.value.__notes__ == ["in group 'trainer'"]
    assert [type(one.error) for one in second.outcomes()] == [CallCancelledError] * 4
    path.unlink()
    busy = both.call("wait_for", str(path))

    def have_begun():
        return {one.method for group in groups for one in group.get_worker_status()} == {"wait_for"}

    try:
        assert eventually(have_begun)  # a worker that has not is not among those that the cancellation leaves
        assert busy.cancel() == {"trainer": [0, 1], "rollouts": [0, 1]}
    finally:
        path.touch()


def test_one_order(groups):
    """All workers see the calls of joined views in one order, whichever thread makes them."""
    trainer, rollouts = groups
    join(trainer, rollouts).call(lambda worker: worker.log.clear()).result()
    views = [join(trainer, rollouts), join(rollouts, trainer)]

    def send(thread):
        for number in range(30):
            views[thread].call("who", (thread, number))

    threads = [threading.Thread(target=send, args=(at,)) for at in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    logs = views[0].call("read_log").result()
    assert len(logs[0]) == 60
    assert all(log == logs[0] for log in logs)


def wait_and_set_epoch(worker, path, epoch):
    worker.wait_for(path)
    published = sys.modules["_fairlead_worker"]
    published.facts = {**published.facts, "epoch": epoch}


def test_handles_in_another_epoch(groups, tmp_path):
    """If workers of a handle's part refuse a call, the error says which, and names the group."""
    trainer, rollouts = groups
    both, path = join(trainer, rollouts.handle()), tmp_path / "open"
    both.call(lambda worker: worker.log.clear()).result()

    def begin_epoch(view, take):
        """Let workers of a view begin an epoch after a call was sent to them, and return its results."""
        path.unlink(missing_ok=True)
        roster, now, epoch = rollouts._roster, rollouts._roster.now, rollouts.inspect().epoch + 1
        facts = [replace(one, epoch=epoch) for one in now.facts]
        busy = view.call(wait_and_set_epoch, str(path), epoch)
        call = both.call("who", epoch)
        roster.commit(epoch=epoch, sharding=now.sharding, places=now.places, facts=facts, started=[], resize=None)
        rollouts._resources.registration.publish()
        path.touch()
        busy.result()
        return take(call)

    for take in (lambda call: call.result(), list, lambda call: call.outcomes()):
        with pytest.raises(EpochError) as refused:
            begin_epoch(rollouts, take)
        assert (refused.value.ran, refused.value.refused) == ((), (0, 1))
        assert refused.value.__notes__ == ["in group 'rollouts'"]
    with pytest.raises(EpochError) as refused:
        begin_epoch(rollouts.at(worker=1), lambda call: call.result())
    assert (refused.value.ran, refused.value.refused) == ((0,), (1,))
    rollouts.at(worker=0).call(wait_and_set_epoch, str(path), rollouts.inspect().epoch).result()
    assert both.call("read_log").result() == [[1, 2, 3, 4], [1, 2, 3, 4], [4], []]


def test_by_lane(groups):
    """A part with an open lane is called by it, and its errors name the group too."""
    trainer, rollouts = groups
    with rollouts.lane():
        call = join(trainer, rollouts).call("who", PerWorker([1, 2, 3, 4]))
        assert [values[-1] for values in call.result()] == [1, 2, 3, 4]
        assert [one.statistics().route for one in call.calls] == ["ray", "lane"]
        with pytest.raises(KeyError) as failed:
            join(trainer, rollouts).call("fail", "rollouts", 0).result()
    assert failed.value.__notes__[-1] == "in group 'rollouts'"


def test_a_lost_worker(doomed):
    """A dead worker is reported at once with its group; a group that does not restart it refuses for all."""
    trainer, rollouts = doomed
    both = join(trainer, rollouts)
    assert both.call("who").wait()
    with pytest.raises(WorkerFailureError, match=r"rank 1 .*of 'rollouts' on node") as lost:
        both.call("die", "rollouts", 1).result(timeout=100.0)
    assert [(one.group, one.rank, one.kind) for one in lost.value.failures] == [("rollouts", 1, "killed")]
    kill(rollouts, 0)
    kill(trainer, 0)
    kill(trainer, 1)  # they sleep
    with pytest.raises(WorkerFailureError):
        trainer.call("who").result()
    with pytest.raises(WorkerFailureError) as refused:
        both.call("who", 1)
    assert {one.group for one in refused.value.failures} == {"trainer"}
    assert rollouts.worker_metadata[1]["state"] == "dead"
    trainer.restart_failed_workers()
    # The rollouts are restarted before anything is sent.
    assert [values[:2] for values in both.call("who", 2).result()][2:] == [("rollouts", 0), ("rollouts", 1)]
    assert rollouts.call("read_log").result() == [[2], [2]]
    assert trainer.call("read_log").result() == [[2], [2]]


@pytest.mark.parametrize("doomed", [Restart(on_failure=True)], indirect=True)
def test_retries(doomed, tmp_path):
    """With `retries`, the call is repeated on the lost worker, and the other workers run it once."""
    path = tmp_path / "dies"
    path.touch()
    assert join(*doomed).call("die_once", str(path), retries=1).result() == [0, 1, 0, 1]
    assert join(*doomed).call("read_log").result() == [[1], [1], [1], [1]]
    assert not path.exists()


def test_a_loss_that_causes_errors_of_other_groups(doomed):
    """The loss of a worker is raised instead of the error of another group that communicated with it."""
    trainer, rollouts = doomed
    (pid,) = trainer.at(worker=0).call(lambda worker: os.getpid()).result()
    with pytest.raises(WorkerFailureError) as lost:
        join(trainer, rollouts).call("lose_peer", pid).result(timeout=100.0)
    assert [(one.group, one.rank) for one in lost.value.failures] == [("trainer", 0)]


def test_a_wait_on_an_event_loop(groups):
    """On an event loop, a call that cannot be sent yet is sent later, in its turn."""
    trainer, rollouts = groups
    join(trainer, rollouts).call(lambda worker: worker.log.clear()).result()

    async def run():
        gate = rollouts._membership.gate
        gate.close()
        try:
            calls = [join(trainer, rollouts).call("who", number) for number in range(3)]
            assert "waits to be sent" in repr(calls[0])
            late = rollouts.call("who", 3)
        finally:
            gate.open()
        assert [[values[-1] for values in await call] for call in calls] == [[0] * 4, [1] * 4, [2] * 4]
        await late

    asyncio.run(run())
    assert trainer.call("read_log").result() == [[0, 1, 2]] * 2
    assert rollouts.call("read_log").result() == [[0, 1, 2, 3]] * 2


def test_an_ended_group(doomed):
    """A group that was shut down refuses the call for all, with its name."""
    trainer, rollouts = doomed
    both = join(trainer, rollouts)
    rollouts.shutdown()
    with pytest.raises(WorkerGroupError, match="shut down") as ended:
        both.call("who", 1)
    assert ended.value.__notes__ == ["in group 'rollouts'"]
    assert trainer.call("read_log").result() == [[], []]
    assert repr(both) == f"JoinedView({trainer!r}, {rollouts!r})"
