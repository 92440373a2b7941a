# SPDX-License-Identifier: Apache-2.0
"""Plans from lengths alone, and plans that balance the cost of ranks."""

import math
import pickle
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fairlead_batching import BatchedDataDict, DynamicBatchingArgs, SequencePackingArgs, plan_shards

KEYS = {"input_key": "tokens", "input_lengths_key": "length"}
LENGTHS = [2, 8, 4, 6, 1, 7, 3, 5]
COSTS = [(1.0, 0.0), (0.0, 1.0), (1.0, 0.25)]


def dynamic(tokens, multiple=1, **more):
    return DynamicBatchingArgs(max_tokens_per_microbatch=tokens, sequence_length_round=multiple, **KEYS, **more)


def packing(tokens, algorithm="first_fit_decreasing", multiple=1, **more):
    return SequencePackingArgs(
        max_tokens_per_microbatch=tokens, algorithm=algorithm, sequence_length_pad_multiple=multiple, **KEYS, **more
    )


def same_shards(one, other):
    return all(
        a["name"] == b["name"] and np.array_equal(a["tokens"], b["tokens"]) and a.__dict__.keys() == b.__dict__.keys()
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"allow_uneven_shards": True},
        {"batch_size": 4},
        {"dynamic_batching_args": dynamic(12, 2)},
        {"dynamic_batching_args": dynamic(12, 2, cost=(0, 1)), "batch_size": 4},
        {"sequence_packing_args": packing(12)},
        {"sequence_packing_args": packing(12, "balanced", cost=(1, 1))},
    ],
)
def test_a_plan_from_lengths_is_the_plan_of_the_batch(make_batch, how):
    """plan_shards() needs no data, travels by pickle, and gives the shards of shard_by_batch_size()."""
    batch = make_batch(LENGTHS)
    plan = pickle.loads(pickle.dumps(plan_shards(LENGTHS, 2, width=8, **how)))
    shards = batch.shard(plan)
    expected = batch.shard_by_batch_size(2, **how)
    expected, order = expected if isinstance(expected, tuple) else (expected, None)
    assert same_shards(shards, expected)
    for one, other in zip(shards, expected, strict=True):
        assert one.plan == other.plan
    assert order is None or order == plan.order.tolist()
    assert BatchedDataDict.from_batches(shards).reorder_data(plan.order)["name"] == batch["name"]
    assert [part.tolist() for part in plan.samples] == [
        [int(name.split()[1]) for name in shard["name"]] for shard in shards
    ]


def test_microbatches_of_a_plan(make_batch):
    """The plan names the samples of each microbatch, over all groups."""
    plan = plan_shards(LENGTHS, 2, batch_size=4, dynamic_batching_args=dynamic(8), width=8)
    shards = make_batch(LENGTHS).shard(plan)
    for shard, parts in zip(shards, plan.microbatches, strict=True):
        found = [part["name"] for part in shard.make_microbatch_iterator_with_dynamic_shapes()]
        assert found == [[f"sample {sample}" for sample in part] for part in parts]
    with pytest.raises(ValueError, match="The plan has no microbatches"):
        plan_shards(8, 2).microbatches  # noqa: B018


def test_a_plan_is_frozen_and_shows_its_ranks():
    """A plan cannot be changed; as text it is a table of samples, tokens and cost per shard."""
    plan = plan_shards(LENGTHS, 2, sequence_packing_args=packing(12, cost=(0, 1)))
    with pytest.raises(FrozenInstanceError):
        plan.samples = ()
    lines = str(plan).splitlines()
    assert lines[0] == "8 samples over 2 shards, the most expensive 1.0000x the mean"
    assert lines[1].split() == ["shard", "samples", "microbatches", "tokens", "cost"]
    assert lines[2].split() == ["0", "4", "2", "18", "102"]
    assert str(plan_shards(4, 2)).splitlines()[1].split() == ["shard", "samples"]
    assert plan_shards(4, 2).imbalance == 1.0


def test_width_is_the_limit_of_padded_lengths():
    """Without a width a padded length is a multiple of the rounding; with one it never exceeds it."""
    lengths = {
        width: plan_shards([5, 5], 1, dynamic_batching_args=dynamic(16, 8), width=width).micro_batch_lengths
        for width in (None, 5)
    }
    assert lengths == {None: [[[8]]], 5: [[[5]]]}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: plan_shards(8, 2, dynamic_batching_args=dynamic(8)), ValueError, "length of each sample; .*number, 8"),
        (lambda: plan_shards(-1, 2), ValueError, "lengths must be at least 0, got -1"),
        (lambda: plan_shards([1.5], 1), ValueError, "'lengths' must be whole numbers, found float64"),
        (lambda: plan_shards([], 1), ValueError, "An empty batch cannot be sharded"),
        (lambda: plan_shards([3, -1], 2, dynamic_batching_args=dynamic(8)), ValueError, "'length' .*sample 1 has -1"),
        *(
            (
                lambda how=how: plan_shards([2**63 - 10], 1, **how),
                ValueError,
                f"{2**63 - 10} tokens cannot be padded to a multiple of 4096",
            )
            for how in (
                {"dynamic_batching_args": dynamic(2**63 - 1, 4096)},
                {"sequence_packing_args": packing(2**63 - 1, multiple=4096)},
            )
        ),
        (
            lambda: plan_shards([3, 9], 2, dynamic_batching_args=dynamic(16), width=8),
            ValueError,
            "'length' says that sample 1 has 9 tokens; 'tokens' has width 8",
        ),
        (
            lambda: plan_shards([3, 9], 2, sequence_packing_args=packing(8, cost=(1, 0))),
            ValueError,
            "Sample 1 of 'tokens' has 9 tokens by 'length', padded 9, more than a bin of max_tokens_per_microbatch=8",
        ),
        (
            lambda: plan_shards([3, 9], 2, dynamic_batching_args=dynamic(8), sequence_packing_args=packing(8)),
            ValueError,
            "were both given: choose one",
        ),
    ],
)
def test_lengths_that_cannot_be_planned(call, error, message):
    """Bad lengths are refused with the leaf, the sample and the numbers."""
    with pytest.raises(error, match=message):
        call()


def test_a_plan_of_another_batch(make_batch):
    """A plan is refused by a batch of another size or of other lengths, with the sample and the remedy."""
    plan = plan_shards(LENGTHS, 2, dynamic_batching_args=dynamic(8))
    with pytest.raises(ValueError, match=r"plan is of another batch: it has 8 samples, the batch 4. .*plan_shards\(\)"):
        make_batch(LENGTHS[:4]).shard(plan)
    other = [*LENGTHS[:5], 6, *LENGTHS[6:]]
    with pytest.raises(ValueError, match="another batch: sample 5 has 7 tokens in the plan, and 6 by 'length'"):
        make_batch(other).shard(plan)


@pytest.mark.parametrize(
    "cost", [(-1, 0), (0, 0), (1, math.nan), (math.inf, 1), (1,), (1, 2, 3), 5, "ab", ("1", "2"), np.sqrt], ids=repr
)
@pytest.mark.parametrize("make", [dynamic, packing])
def test_bad_coefficients(make, cost):
    """A cost is two finite numbers of at least 0; anything else is refused with the arguments."""
    with pytest.raises(ValueError, match=r"cost must be two finite numbers \(a, b\) of at least 0"):
        make(8, cost=cost)


@st.composite
def problems(draw):
    shards = draw(st.integers(1, 5))
    group = shards * draw(st.integers(1, 6))
    uneven = draw(st.booleans())
    size = group + draw(st.integers(0, shards - 1)) if uneven else group * draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(0, 12), min_size=size, max_size=size))
    return lengths, {"shards": shards, "batch_size": None if uneven else group, "allow_uneven_shards": uneven}


@given(
    problems(), st.integers(12, 40), st.sampled_from(COSTS), st.sampled_from(["dynamic", "balanced", "concatenative"])
)
def test_every_plan_with_a_cost(problem, tokens, cost, how):
    """Each sample occurs once, the cap holds, and all shards have the same number of microbatches in every group."""
    lengths, arguments = problem
    planned = (
        {"dynamic_batching_args": dynamic(tokens, 2, cost=cost)}
        if how == "dynamic"
        else {"sequence_packing_args": packing(tokens, how, 2, cost=cost)}
    )
    try:
        plan = plan_shards(lengths, **arguments, width=12, **planned)
    except ValueError as error:
        if not any(text in str(error) for text in ("same number of microbatches", "cannot fill")):
            raise
        return
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    assert len({tuple(map(len, cuts)) for cuts in plan.micro_batch_indices}) == 1
    padded = np.minimum(-(-np.array(lengths) // 2) * 2, 12)
    for parts in plan.microbatches:
        for part in parts:
            assert len(part)
            assert (padded[part].max() * len(part) if how == "dynamic" else padded[part].sum()) <= tokens
    if how == "dynamic":
        without = plan_shards(lengths, **arguments, width=12, dynamic_batching_args=dynamic(tokens, 2))
        assert plan.micro_batch_lengths == without.micro_batch_lengths, "the shapes are those without a cost"
        assert list(map(len, plan.samples)) == list(map(len, without.samples))


def lognormal(count=65_536, most=8192):
    drawn = np.random.default_rng(0).lognormal(math.log(512), 1.0, count)
    return np.clip(drawn.astype(np.int64), 1, most)


@pytest.mark.parametrize("make", [dynamic, lambda tokens, **more: packing(tokens, "balanced", **more)])
def test_ranks_cost_the_same(make):
    """On 65,536 lengths over 64 ranks the most expensive rank is within 2 % of the mean, and the cap holds."""
    lengths = lognormal()
    name = "dynamic_batching_args" if make is dynamic else "sequence_packing_args"
    plan = plan_shards(lengths, 64, **{name: make(16_384, cost=(0.0, 1.0))})
    of_rank = [sum(lengths[part] ** 2) for part in plan.samples]
    assert max(of_rank) / np.mean(of_rank) <= 1.02
    assert plan.imbalance == pytest.approx(max(of_rank) / np.mean(of_rank))
    counts = [list(map(len, parts)) for parts in plan.microbatches]
    assert len(set(map(len, counts))) == 1
    sizes = np.concatenate(counts)
    starts = np.cumsum(sizes) - sizes
    if make is dynamic:
        tokens = np.maximum.reduceat(lengths[plan.order], starts) * sizes
    else:
        tokens = np.add.reduceat(lengths[plan.order], starts)
    assert tokens.max() <= 16_384


def test_groups_balance_in_total():
    """Where a group is too small to be balanced, its most expensive shard is another one in the next group."""
    lengths = lognormal(4096)
    plans = {
        cost: plan_shards(lengths, 16, batch_size=64, dynamic_batching_args=dynamic(16_384, cost=cost))
        for cost in (None, (0.0, 1.0))
    }
    of_rank = {cost: [float((lengths[part] ** 2).sum()) for part in plan.samples] for cost, plan in plans.items()}
    imbalance = {cost: max(costs) / np.mean(costs) for cost, costs in of_rank.items()}
    assert imbalance[0.0, 1.0] < 1.05 < 2 < imbalance[None]


def test_microbatches_of_a_rank_cost_the_same():
    """Balanced packing with a cost spreads it over the microbatches of a rank, the most expensive first."""
    lengths = lognormal(4096, most=2048)
    spread = {}
    for algorithm in ("first_fit_decreasing", "balanced"):
        plan = plan_shards(lengths, 8, sequence_packing_args=packing(16_384, algorithm, cost=(1.0, 1e-3)))
        costs = [[plan.costs[part].sum() for part in parts] for parts in plan.microbatches]
        assert costs == [sorted(of_rank, reverse=True) for of_rank in costs]
        spread[algorithm] = max(max(of_rank) / np.mean(of_rank) for of_rank in costs)
    assert spread["balanced"] < spread["first_fit_decreasing"]


@pytest.mark.parametrize("each", [16, 65])
@pytest.mark.parametrize("groups", [1, 3])
def test_few_sequences_of_very_different_costs(each, groups):
    """Packing gives a shard with an expensive sequence fewer sequences, within as many microbatches and tokens."""
    lengths = lognormal(64 * each * groups)
    args = packing(16_384, "balanced", cost=(0.0, 1.0))
    plan = plan_shards(lengths, 64, batch_size=64 * each, sequence_packing_args=args)
    costs = plan.costs.reshape(groups, -1)
    # A shard cannot cost less than its most expensive sequence.
    assert plan.imbalance < 1.02 * max(1.0, (64 * costs.max(axis=1)).sum() / costs.sum())
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    bins = [[len(group) for group in shard] for shard in plan.micro_batch_indices]
    assert bins == bins[:1] * 64
    assert max(tokens for shard in plan.micro_batch_lengths for group in shard for tokens in group) <= 16_384
    fewest = [-(-int(group.sum()) // (16_384 * 64)) for group in lengths.reshape(groups, -1)]
    assert all(count <= least + 1 for count, least in zip(bins[0], fewest, strict=True))


@given(
    problems(), st.integers(12, 40), st.sampled_from(COSTS), st.sampled_from(["dynamic", "balanced", "concatenative"])
)
@example(([1, 5, 7, 7, 9, 5], {"shards": 2}), 10, (0.0, 1.0), "first_fit_decreasing")
@example(([3, 2, 3, 3, 7, 1], {"shards": 2}), 10, (0.0, 1.0), "first_fit_decreasing")
def test_a_cost_makes_no_plan_worse(problem, tokens, cost, how):
    """A plan with a cost has no more microbatches than one without, and its most expensive shard costs no more."""
    lengths, arguments = problem

    def plan(cost):
        if how == "dynamic":
            return plan_shards(lengths, **arguments, dynamic_batching_args=dynamic(tokens, cost=cost))
        return plan_shards(lengths, **arguments, sequence_packing_args=packing(tokens, how, cost=cost))

    try:
        without = plan(None)
    except ValueError:
        return
    found = plan(cost)
    for group, expected in zip(found.micro_batch_indices[0], without.micro_batch_indices[0], strict=True):
        assert len(group) <= len(expected)
    most = max(found.costs[samples].sum() for samples in without.samples)
    assert max(found.total_costs()) <= most * (1 + 1e-12)


@pytest.mark.parametrize("without", [None, "length", "tokens"])
@pytest.mark.parametrize("how", [{"dynamic_batching_args": dynamic(16)}, {"sequence_packing_args": packing(16)}])
def test_a_plan_checks_the_width_of_the_batch(make_batch, how, without):
    """Applying a plan refuses lengths beyond the width of the batch, as planning with the batch does."""
    batch = make_batch([4, 4])
    batch["length"] = np.array([7, 8])
    plan = plan_shards([7, 8], 1, **how)
    with pytest.raises(ValueError, match="sample 0 has 7 tokens; 'tokens' has width 4"):
        batch.shard_by_batch_size(1, **how)
    if without:
        del batch[without]
    if without == "tokens":
        assert batch.shard(plan)[0].size == 2, "nothing has a width"
        return
    with pytest.raises(ValueError, match="sample 0 has 7 tokens; 'tokens' has width 4"):
        batch.shard(plan)
