# SPDX-License-Identifier: Apache-2.0
"""The adapter for miles: over stand-ins of the parts of miles that it imports, and over the parts of a checkout."""

import asyncio
import enum
import inspect
import random
import sys
from argparse import Namespace

import pytest

from fairlead_rollouts.miles import LedgerDataBuffer, LedgerDataSource

pytestmark = pytest.mark.nightly


class SampleStandIn:
    """In place of miles' `Sample`."""

    Status = enum.Enum("Status", ["COMPLETED", "ABORTED"], module=__name__, qualname="SampleStandIn.Status")

    def __init__(self, prompt="", weight_versions=()):
        self.prompt, self.weight_versions, self.status = prompt, list(weight_versions), self.Status.COMPLETED

    @property
    def oldest_weight_version(self):
        return min(map(int, self.weight_versions), default=None)


class SourceStandIn:
    """In place of miles' `RolloutDataSource`."""

    def __init__(self, args):
        self.dataset = None


def call_filter_stand_in(function, *args):
    """In place of miles' `call_dynamic_filter`."""
    return Namespace(keep=True) if function is None else function(*args)


PARTS = {
    "miles": {},
    "miles.rollout": {},
    "miles.rollout.data_source": {"RolloutDataSource": SourceStandIn},
    "miles.rollout.filter_hub": {},
    "miles.rollout.filter_hub.base_types": {"call_dynamic_filter": call_filter_stand_in},
    "miles.utils": {},
    "miles.utils.misc": {"load_function": lambda path: path},
    "miles.utils.types": {"Sample": SampleStandIn},
}


@pytest.fixture(params=["stand-ins", "checkout"])
def part(request, monkeypatch, put_modules):
    """Return a function that returns a member of one of miles' modules."""
    if request.param == "checkout":
        request.getfixturevalue("miles_buffer")
    else:
        put_modules(PARTS)
    monkeypatch.setattr(LedgerDataSource, "latest", None)
    return lambda module, name: getattr(sys.modules[module], name)


@pytest.fixture
def make(part, tmp_path):
    """Return a maker of a data source and a data buffer, with batches of two groups of two."""

    def make(**options):
        given = {
            "n_samples_per_prompt": 2,
            "rollout_batch_size": 2,
            "update_weights_interval": 1,
            "start_rollout_id": 0,
        }
        given |= {"rollout_global_dataset": False, "rollout_shuffle": False, "max_weight_staleness": 1}
        given |= {"async_unused_samples_handler": "retry", "async_data_buffer_capacity_factor": 2.0}
        given |= {"dynamic_sampling_filter_path": None, "save": str(tmp_path), "load": str(tmp_path), **options}
        args = Namespace(**given)
        source = LedgerDataSource(args)
        source.load(args.start_rollout_id - 1)
        return source, LedgerDataBuffer(Namespace(args=args, unused_handler_fn=None))

    return make


def finish(group, version, *, aborted=False):
    """Return a group as miles puts it."""
    for sample in group:
        sample.weight_versions = [str(version)]
        if aborted:
            sample.status = type(sample).Status.ABORTED
    return Namespace(prompt_group=group, group=group)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def ordinal(entry):
    return entry.group[0].group_index


def test_needs_the_data_source(part):
    """The buffer needs the data source of the same module."""
    args = Namespace(dynamic_sampling_filter_path=None)
    with pytest.raises(ValueError, match="--data-source-path"):
        LedgerDataBuffer(Namespace(args=args))


def test_get_waits_for_put(make):
    """A group that is put is what `get` returns, and metrics count it."""
    source, buffer = make()

    async def both():
        waiting = asyncio.create_task(buffer.get(current_version=5))
        await asyncio.sleep(0)
        [group] = source.get_samples(1)
        await buffer.put(finish(group, 5))
        return await waiting

    assert ordinal(run(both())) == 0
    assert buffer.get_metrics()["rollout/ledger/claimed"] == 1


def test_a_checkpoint_that_is_loaded_later(make):
    """A buffer that was made before uses the ledger of the checkpoint."""
    source, buffer = make()
    source.save(0)
    source.load(0)
    [group] = source.get_samples(1)
    run(buffer.put(finish(group, 0)))
    assert source.ledger.statistics().sealed == 1


def test_aborted_groups_are_generated_again(make):
    """With `retry` an aborted group is given out again; with `drop` another one is."""
    for handler, following in (("retry", 0), ("drop", 1)):
        source, buffer = make(async_unused_samples_handler=handler)
        [group] = source.get_samples(1)
        run(buffer.put(finish(group, 0, aborted=True)))
        assert source.get_samples(1)[0][0].group_index == following
        source.ledger.check()


def test_filter(make):
    """A group that the filter does not keep is dropped with its reason."""
    source, buffer = make()
    buffer._filter = lambda args, group: Namespace(keep=False, reason="zero_std")
    buffer._call = call_filter_stand_in
    [group] = source.get_samples(1)
    run(buffer.put(finish(group, 0)))
    assert source.ledger.statistics().drops == {"zero_std": 1}


def test_old_groups_are_generated_again(make):
    """No group is claimed that is older than the bound at the step that trains it."""
    source, buffer = make()

    async def rollouts():
        groups = source.get_samples(3)
        for group in groups:
            await buffer.put(finish(group, 1))
        first = [ordinal(await buffer.get(current_version=1)) for _ in range(2)]
        fresh = source.get_samples(1)
        await buffer.put(finish(fresh[0], 3))
        return first, ordinal(await buffer.get(current_version=3))

    assert run(rollouts()) == ([0, 1], 3)
    assert source.ledger.state(2) == "pending"
    assert source.get_samples(1)[0][0].group_index == 2


def test_put_waits_for_room(make):
    """`put` waits while the buffer is full, and continues when a group is taken."""
    source, buffer = make(async_data_buffer_capacity_factor=0.5)

    async def fill():
        groups = source.get_samples(2)
        await buffer.put(finish(groups[0], 0))
        second = asyncio.create_task(buffer.put(finish(groups[1], 0)))
        await asyncio.sleep(0.01)
        assert not second.done()
        await buffer.get(current_version=0)
        await second

    run(fill())


def test_a_cancelled_get_claims_nothing(make):
    """A `get` that is cancelled leaves the next group for the next one."""
    source, buffer = make()

    async def cancel():
        waiting = asyncio.create_task(buffer.get(current_version=0))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await buffer.put(finish(source.get_samples(1)[0], 0))
        return ordinal(await buffer.get(current_version=0))

    assert run(cancel()) == 0


def test_bound(make):
    """A bound of 0 is refused, because a rollout is always generated ahead."""
    with pytest.raises(ValueError, match="--max-weight-staleness"):
        make(max_weight_staleness=0)


def test_groups_on_disk(make, tmp_path):
    """With `ledger_keep: disk` finished groups survive a crash, and their files go when a checkpoint covers them."""
    source, buffer = make(ledger_keep="disk", async_data_buffer_capacity_factor=4.0)
    files = tmp_path / "rollout" / "groups"

    async def generate(version, count, **how):
        for group in source.get_samples(count):
            await buffer.put(finish(group, version, **how))

    async def take(version):
        return [ordinal(await buffer.get(current_version=version)) for _ in range(2)]

    run(generate(1, 5))
    assert len(list(files.iterdir())) == 5
    assert run(take(1)) == [0, 1]
    run(generate(1, 1, aborted=True))
    assert len(list(files.iterdir())) == 5, "an aborted group has a file"
    source.save(0)
    assert len(list(files.iterdir())) == 3, "the checkpoint covers two groups"
    run(generate(1, 2))
    assert len(list(files.iterdir())) == 5

    source, buffer = make(ledger_keep="disk", start_rollout_id=1)
    assert len(list(files.iterdir())) == 3, "what was finished after the checkpoint is generated again"
    assert source.ledger.statistics().sealed == 3
    assert run(take(1)) == [2, 3]
    fork, _ = make(ledger_keep="disk", start_rollout_id=1, save=str(tmp_path / "fork"))
    assert fork.ledger.statistics().sealed == 3
    fork.ledger.drop([2], "no_signal")
    assert len(list(files.iterdir())) == 3, "another run has deleted them"
    source.save(1)
    assert len(list(files.iterdir())) == 1
    with pytest.raises(ValueError, match="ledger_keep is 'memory'"):
        make(ledger_keep="memory")
    with pytest.raises(ValueError, match="below --save, which is not set"):
        make(ledger_keep="disk", save=None)


@pytest.mark.parametrize("keep", [None, "disk"])
@pytest.mark.parametrize("seed", range(5))
def test_fifty_rollouts_with_crashes(make, tmp_path, seed, keep):
    """`train_async.py` generates a rollout ahead and saves: no group is too old, and a resume skips none."""
    rng = random.Random(seed)

    async def train():
        start, trained, saved = 0, [], []
        while start < 50:
            source, buffer = make(start_rollout_id=start, ledger_keep=keep)
            trained, version, first = list(saved), 1, start  # the versions of a new process begin at 1
            worker = asyncio.create_task(produce(source, buffer, lambda: version))  # noqa: B023
            following = await drain(buffer, version)
            while start < 50:
                batch = following
                following = await drain(buffer, version)
                trained += map(ordinal, batch)
                oldest = min(one.oldest_weight_version for entry in batch for one in entry.group)
                assert version - oldest <= 1
                version += 1
                start += 1
                if start % 3 == 0 or start == 50:
                    source.save(start - 1)
                    saved = list(trained)
                source.ledger.check()
                if rng.random() < 0.1 and first + 3 < start < 50:
                    start -= start % 3
                    break
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)
        return trained, source

    async def drain(buffer, version):
        return [await buffer.get(current_version=version) for _ in range(2)]

    async def produce(source, buffer, version):
        active = []
        while True:
            while len(active) < 3:
                active.append((source.get_samples(1)[0], version()))
            group, began = active.pop(rng.randrange(len(active)))
            await buffer.put(finish(group, began, aborted=rng.random() < 0.1))
            await asyncio.sleep(0)

    trained, source = run(train())
    assert len(trained) == len(set(trained)) == 100
    missing = set(range(max(trained))) - set(trained)
    assert {source.ledger.state(one) for one in missing} <= {"claimed", "sealed", "leased", "pending"}
    held = source.ledger.statistics()
    assert len(list(tmp_path.glob("rollout/groups/*"))) in (range(held.sealed + held.claimed, 104) if keep else [0])


def test_seam(miles_buffer):
    """The adapter has the methods of miles' buffer and data source, with their parameters."""
    source = sys.modules["miles.rollout.data_source"]
    for ours, theirs in ((LedgerDataBuffer, miles_buffer.DataBuffer), (LedgerDataSource, source.DataSource)):
        for name, method in inspect.getmembers(theirs, inspect.isfunction):
            given = list(inspect.signature(getattr(ours, name)).parameters)
            wanted = list(inspect.signature(method).parameters)
            assert given[: len(wanted)] == wanted or wanted[-1] == "context", name
    fields = inspect.signature(miles_buffer.DataBufferInput).parameters
    assert {"prompt_group", "group"} == fields.keys()
    assert {"args", "unused_handler_fn"} == inspect.signature(miles_buffer.DataBufferConstructorInput).parameters.keys()
