# SPDX-License-Identifier: Apache-2.0
"""The adapters for slime and miles, over stand-ins of the parts that they import."""

import asyncio
import copy
from argparse import Namespace

import pytest
from adapters import entry, make_args, prompt_ids, put_modules
from invariants import check

from fairlead_rollouts import SnapshotError, miles, slime


@pytest.fixture
def make(monkeypatch, tmp_path):
    """Return a maker of a data source, as a manager makes it before the driver knows the first rollout."""
    put_modules(monkeypatch)
    monkeypatch.setattr(miles.LedgerDataSource, "latest", None)
    sources = []

    def make(framework, load=-1, **options):
        source = framework.LedgerDataSource(make_args(tmp_path / str(len(sources)), **options))
        source.load(load)
        sources.append(source)
        return source

    yield make
    for source in sources:
        source.ledger.close()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def make_buffer(source):
    return miles.LedgerDataBuffer(Namespace(args=source._args, unused_handler_fn=None))


def test_prompts_have_ids(make):
    """Groups have their prompt id as index, samples count on, and a new epoch has its own order."""
    source = make(slime, prompts=3)
    groups = source.get_samples(9)
    assert prompt_ids(groups) == [0, 1, 2, 3]
    assert [sample.index for group in groups for sample in group] == list(range(8))
    assert len({group[0].prompt for group in groups[:3]}) == 3
    assert groups[3][0].prompt.startswith("1:")
    assert source.get_samples(1) == []
    assert len(source) == 3


@pytest.mark.parametrize("framework", [slime, miles])
def test_what_a_generate_function_returns(make, framework):
    """A late group does not take the lease of its replacement; trajectories may be lists, or lack the metadata."""
    source = make(framework, ledger_deadline_s=-1.0)
    [late] = copy.deepcopy(source.get_samples(1))
    source._args.ledger_deadline_s = 3600.0
    again, other = source.get_samples(2)
    assert prompt_ids([late, again]) == [0, 0]
    turns = [[sample, copy.deepcopy(sample)] for sample in again]
    for sample in other:
        sample.metadata = {}
    if framework is slime:
        assert source.take(0, [late]) == 2
        assert source.take(0, [turns, other]) == [turns, other]
        source.add_samples([late])
    else:
        buffer = make_buffer(source)
        run(buffer.put(entry(late, 0)))
        assert source.ledger.state(0) == "leased"
        run(buffer.put(entry(again, 0, result=turns)))
        run(buffer.put(entry(other, 0)))
        assert run(buffer.get(current_version=0)).group is turns
    assert source.ledger.statistics().fenced == 2  # samples
    check(source.ledger)


@pytest.mark.parametrize(("missing", "first"), [("restart", 0), ("epoch", 20)])
def test_a_run_that_began_without_a_ledger(make, missing, first):
    """A checkpoint without a snapshot is an error, unless an option says where to begin."""
    with pytest.raises(SnapshotError, match=r"Set ledger_missing to 'restart' .at prompt 0. or 'epoch'"):
        make(slime, load=6)
    source = make(slime, load=6, ledger_missing=missing)
    assert prompt_ids(source.get_samples(1)) == [first]
    assert (source.ledger.last_trained, source.ledger.version) == (7, 7)
    with pytest.raises(ValueError, match="ledger_missing is 'begin'"):
        make(slime, ledger_missing="begin")


def test_evaluation_and_prefetch(make):
    """Evaluation is slime's own. With `train_async.py` a rollout is always a version old."""
    source = make(slime)
    assert slime.generate_rollout(source._args, 0, source, evaluation=True) == {"evaluation": True}
    assert source.ledger.statistics().claimed == 0
    assert prompt_ids(slime.generate_rollout(source._args, 0, source)) == [0, 1]
    with pytest.raises(ValueError, match="ledger_max_staleness is 0"):
        make(slime, ledger_max_staleness=0)
    make(slime, ledger_max_staleness=0, ledger_prefetch=0)


def test_the_buffer_needs_the_data_source(make):
    """The buffer and the data source share a ledger."""
    source = make(miles)
    miles.LedgerDataSource.latest = None
    with pytest.raises(ValueError, match="--data-source-path"):
        make_buffer(source)
    with pytest.raises(ValueError, match="--max-weight-staleness"):
        make(miles, max_weight_staleness=0)


def test_get_waits_for_put(make):
    """A group that is put is what `get` returns, and a cancelled `get` claims nothing."""
    source = make(miles)
    buffer = make_buffer(source)

    async def both():
        cancelled = asyncio.create_task(buffer.get(current_version=5))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        waiting = asyncio.create_task(buffer.get(current_version=5))
        await asyncio.sleep(0)
        [group] = source.get_samples(1)
        await buffer.put(entry(group, 5))
        return (await waiting).group is group

    assert run(both())
    assert buffer.get_metrics()["rollout/ledger/claimed"] == 1


@pytest.mark.parametrize(("handler", "following"), [("retry", 0), ("drop", 1)])
def test_aborted_groups(make, handler, following):
    """With `retry` an aborted group is given out again; with `drop` another one is."""
    source = make(miles, async_unused_samples_handler=handler)
    [group] = source.get_samples(1)
    run(make_buffer(source).put(entry(group, 0, aborted=True)))
    assert prompt_ids(source.get_samples(1)) == [following]
    check(source.ledger)


def test_filter(make):
    """A group that the filter does not keep is dropped with its reason."""
    source = make(miles)
    buffer = make_buffer(source)
    buffer._filter = lambda args, group: Namespace(keep=False, reason="zero_std")
    run(buffer.put(entry(source.get_samples(1)[0], 0)))
    assert source.ledger.statistics().drops == {"zero_std": 1}


def test_put_waits_for_room(make):
    """`put` waits while the buffer is full, and continues when a group is taken."""
    source = make(miles, async_data_buffer_capacity_factor=0.5)
    buffer = make_buffer(source)

    async def fill():
        groups = source.get_samples(2)
        await buffer.put(entry(groups[0], 0))
        second = asyncio.create_task(buffer.put(entry(groups[1], 0)))
        await asyncio.sleep(0.01)
        assert not second.done()
        await buffer.get(current_version=0)
        await second

    run(fill())
