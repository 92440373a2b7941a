# SPDX-License-Identifier: Apache-2.0
"""The adapter for NeMo RL: with its own samplers and buffer from a checkout, and with a stand-in of the buffer."""

import asyncio
import hashlib
import inspect
import random

import pytest

from fairlead_rollouts import OpenGroup, ReadyFirst, View, WeightFifo, Windowed
from fairlead_rollouts.nemo import LedgerSampler

pytestmark = pytest.mark.nightly

# Of the choices of NeMo RL's own samplers at 7ea279a on the buffers below.
RECORDED = "3ddd59f4c4db8f2c05d143eddb35626bf7d113895ffcc96254c6cde80c7c649a"


class BufferStandIn:
    """In place of NeMo RL's `TQReplayBuffer`: the attributes and the method that samplers use."""

    def __init__(self):
        self.meta_list, self.start_weight_list, self.target_step_list = [], [], []
        self.ready_list, self._group_ids, self.cleared = [], [], []

    def reserve(self, *, weight_version, target_step=None, group_id=None):
        self.meta_list.append(None)
        self.start_weight_list.append(weight_version)
        self.target_step_list.append(target_step)
        self.ready_list.append(False)
        self._group_ids.append(group_id)
        return group_id

    def finish(self, group_id):
        place = self._group_ids.index(group_id)
        self.meta_list[place], self.ready_list[place] = Meta([group_id]), True

    async def remove(self, idxs, remove_in_dp):
        for place in sorted(idxs, reverse=True):
            if remove_in_dp:
                self.cleared.append(self._group_ids[place])
            for one in (self.meta_list, self.start_weight_list, self.target_step_list, self.ready_list):
                del one[place]
            del self._group_ids[place]
        return len(idxs)


class Meta(list):
    """In place of the data of groups."""

    def concat(self, *others):
        return Meta(sum(others, list(self)))


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 10))


def select(sampler, version, count, minimum=None):
    least = count if minimum is None else minimum
    found = sampler.select(current_train_weight=version, min_prompt_groups=least, max_prompt_groups=count)
    return run(found)


def fill(buffer, version, names, ready=True):
    for name in names:
        buffer.reserve(weight_version=version, group_id=name)
        if ready:
            buffer.finish(name)


def test_waits_for_old_groups():
    """The default policy refuses a batch that would make an unfinished group too old."""
    buffer = BufferStandIn()
    sampler = LedgerSampler(buffer, groups_per_version=2)
    fill(buffer, 0, ["slow"], ready=False)
    fill(buffer, 0, "abc")
    assert select(sampler, 0, 2) == (["a", "b"], 2)
    fill(buffer, 1, "de")
    assert select(sampler, 1, 2) == (None, 0)
    buffer.finish("slow")
    assert select(sampler, 1, 2) == (["slow", "c"], 2)
    assert buffer._group_ids == ["d", "e"]
    assert sampler.ledger.statistics().staleness == {0: 2, 1: 2}
    sampler.ledger.check()


def test_evicts_old_groups():
    """`windowed` removes groups that are too old from the buffer, and the ledger counts them."""
    buffer = BufferStandIn()
    sampler = LedgerSampler(buffer, groups_per_version=2, policy="windowed")
    fill(buffer, 0, "abc")
    fill(buffer, 0, ["slow"], ready=False)
    select(sampler, 0, 2)
    assert run(sampler.evict(current_train_weight=1)) == 0
    assert sampler.should_abort_inflight(start_weight_version=0, current_train_weight=2)
    assert run(sampler.evict(current_train_weight=2)) == 1
    buffer.finish("slow")
    assert run(sampler.evict(current_train_weight=2)) == 1
    assert buffer.cleared == ["c", "slow"]
    assert sampler.ledger.statistics().drops == {"stale": 2}


def test_groups_that_disappear_have_failed():
    """A group that the controller removes from the buffer has failed, and is never claimed."""
    buffer = BufferStandIn()
    sampler = LedgerSampler(buffer, groups_per_version=2, policy="ready_first")
    fill(buffer, 0, "ab", ready=False)
    assert select(sampler, 0, 2, 1) == (None, 0)
    run(buffer.remove([0], remove_in_dp=False))
    buffer.finish("b")
    assert select(sampler, 0, 2, 1) == (["b"], 1)
    assert sampler.ledger.statistics().drops == {"failed": 1}


def test_finished_groups_that_disappear():
    """A finished group that the controller removes from the buffer is never claimed either."""
    buffer = BufferStandIn()
    sampler = LedgerSampler(buffer, groups_per_version=2, policy="ready_first")
    fill(buffer, 0, "a")
    assert select(sampler, 0, 2) == (None, 0)
    run(buffer.remove([0], remove_in_dp=True))
    fill(buffer, 0, "bc")
    assert select(sampler, 0, 2) == (["b", "c"], 2)
    assert sampler.ledger.statistics().drops == {"failed": 1}
    sampler.ledger.check()


def test_cancelled_selection():
    """A selection that is cancelled, or fails, leaves its groups to the next one."""
    buffer = BufferStandIn()
    sampler = LedgerSampler(buffer, groups_per_version=2, policy="ready_first")
    fill(buffer, 0, "abc")
    remove = buffer.remove

    async def fail(idxs, remove_in_dp):
        raise asyncio.CancelledError

    buffer.remove = fail
    with pytest.raises(asyncio.CancelledError):
        select(sampler, 0, 2)
    buffer.remove = remove
    assert select(sampler, 0, 2) == (["a", "b"], 2)
    assert sampler.ledger.statistics().claimed == 2
    sampler.ledger.check()


def test_admission():
    """Gated policies dispatch at most K batches ahead, also after a resume; `windowed` has no gate."""
    sampler = LedgerSampler(BufferStandIn(), groups_per_version=2, max_staleness_versions=1)
    sampler.set_dispatch_index(5)

    async def count(version):
        admitted = 0
        while True:
            try:
                await asyncio.wait_for(sampler.admit(trainer_version_fn=lambda: version), 0.05)
            except TimeoutError:
                return admitted
            admitted += 1

    assert asyncio.run(count(5)) == 2
    assert asyncio.run(count(6)) == 1
    assert (sampler.required_buffer_capacity(4), sampler.is_on_policy) == (8, False)
    windowed = LedgerSampler(BufferStandIn(), groups_per_version=2, policy="windowed", max_staleness_versions=0)
    assert run(windowed.admit(trainer_version_fn=lambda: 0)) is None
    assert (windowed.required_buffer_capacity(4), windowed.is_on_policy) == (None, True)
    with pytest.raises(ValueError, match="'in_order'; use one of"):
        LedgerSampler(BufferStandIn(), groups_per_version=2, policy="in_order")


BOUND = 2


def make_buffers():
    """Yield 1,000 random buffers: the trainer's version, the number of groups to take, and the slots."""
    rng = random.Random(39)
    for _ in range(1000):
        version = rng.randrange(6)
        slots = [(rng.randint(0, version), rng.random() < 0.6) for _ in range(rng.randrange(12))]
        slots.sort(key=lambda slot: slot[0]) if rng.random() < 0.5 else None
        yield version, rng.randint(1, 5), slots


POLICIES = {
    "windowed": Windowed(),
    "freshest": Windowed(freshest_first=True),
    "ready_first": ReadyFirst(),
    "weight_fifo": WeightFifo(),
}


def choose(policy, version, count, slots):
    """Return what a policy takes of a buffer, as the ledger calls it: without finished groups that are too old."""
    bound = None if policy == "ready_first" else BOUND
    limit = -1 if bound is None else version - bound
    groups = [OpenGroup(place, ready, weight) for place, (weight, ready) in enumerate(slots)]
    groups = tuple(group for group in groups if not group.ready or group.oldest_version >= limit)
    return list(POLICIES[policy].select(View(1, version, bound, groups), count).ordinals)


def test_policies_choose_as_recorded():
    """The policies choose what NeMo RL's own samplers chose from 1,000 random buffers."""
    choices = [choose(policy, *buffer) for policy in POLICIES for buffer in make_buffers()]
    assert hashlib.sha256(repr(choices).encode()).hexdigest() == RECORDED


def test_policies_equal_nemo(nemo_samplers):
    """NeMo RL's own samplers choose the same groups."""
    made = {
        "windowed": lambda buffer: nemo_samplers.WindowedSampler(buffer, max_staleness_versions=BOUND),
        "freshest": lambda buffer: nemo_samplers.WindowedSampler(
            buffer, max_staleness_versions=BOUND, sample_freshest_first=True
        ),
        "ready_first": lambda buffer: nemo_samplers.ReadyFirstSampler(buffer, max_staleness_versions=BOUND),
        "weight_fifo": lambda buffer: nemo_samplers.WeightFifoSampler(buffer, max_staleness_versions=BOUND),
    }
    for policy, make in made.items():
        for version, count, slots in make_buffers():
            buffer = BufferStandIn()
            for place, (weight, ready) in enumerate(slots):
                fill(buffer, weight, [place], ready)
            theirs = select(make(buffer), version, count, 1)[0] or []
            assert choose(policy, version, count, slots) == list(theirs), (policy, version, count, slots)


def test_seam(nemo_samplers):
    """The adapter has the protocol of a sampler, is made by the factory, and uses what the real buffer has."""
    config = {"name": "custom", "target": "fairlead_rollouts.nemo:LedgerSampler", "groups_per_version": 4}
    sampler = nemo_samplers.create_sampler(BufferStandIn(), nemo_samplers.CustomSamplerConfig(**config))
    assert isinstance(sampler, LedgerSampler)
    for name, method in inspect.getmembers(nemo_samplers.PromptGroupSampler, inspect.isfunction):
        if not name.startswith("_"):
            ours = inspect.signature(getattr(LedgerSampler, name)).parameters
            assert list(ours) == list(inspect.signature(method).parameters), name
    real = inspect.getsource(nemo_samplers.TQReplayBuffer)
    assert all(f"self.{name}" in real for name in vars(BufferStandIn()) if name != "cleared")
    for name in ("reserve", "remove"):
        theirs = inspect.signature(getattr(nemo_samplers.TQReplayBuffer, name)).parameters
        assert list(inspect.signature(getattr(BufferStandIn, name)).parameters) == list(theirs), name
