# SPDX-License-Identifier: Apache-2.0
"""Packers: all sequences, within capacity, in the requested number of bins, and efficient."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_batching import get_packer

ALGORITHMS = [
    "balanced",
    "concatenative",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "modified_first_fit_decreasing",
]


def find_largest(lengths, bins):
    return max(sum(lengths[index] for index in bin_) for bin_ in bins)


each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


@st.composite
def tasks(draw):
    capacity = draw(st.integers(1, 60))
    # Ties and zeros are frequent, because packers tend to fail there.
    some = st.integers(0, capacity) | st.sampled_from([0, 1, capacity // 3, capacity // 2, capacity])
    return capacity, draw(st.lists(some, min_size=1, max_size=70))


@each_algorithm
@given(tasks(), st.none() | st.integers(1, 9), st.none() | st.integers(1, 5))
def test_every_packing(algorithm, task, at_least, multiple):
    """Each index is in one bin, no bin is empty or over capacity, and their number is as requested or refused."""
    capacity, lengths = task
    packer = get_packer(algorithm, capacity, at_least, multiple)
    try:
        bins = packer.pack(lengths)
    except ValueError as error:
        if f"{len(lengths)} sequences cannot fill" not in str(error):
            raise
        fewest = len(get_packer(algorithm, capacity).pack(lengths))
        wanted = -(-max(fewest, at_least or 1) // (multiple or 1)) * (multiple or 1)
        assert wanted > len(lengths) or algorithm == "balanced"
        return
    assert sorted(index for bin_ in bins for index in bin_) == list(range(len(lengths)))
    assert all(bin_ for bin_ in bins)
    assert max(sum(lengths[index] for index in bin_) for bin_ in bins) <= capacity
    assert len(bins) >= (at_least or 1)
    assert len(bins) % (multiple or 1) == 0
    assert packer.pack(lengths) == bins, "the same lengths give the same bins"


@given(tasks())
def test_tree_is_first_fit(task):
    """First-fit decreasing puts each sequence into the bin that a search from the first bin on would find."""
    capacity, lengths = task
    bins, room = [], []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        number = next((number for number, free in enumerate(room) if lengths[index] <= free), len(bins))
        if number == len(bins):
            bins.append([])
            room.append(capacity)
        bins[number].append(index)
        room[number] -= lengths[index]
    assert get_packer("first_fit_decreasing", capacity).pack(lengths) == bins


@given(tasks())
def test_balanced_is_at_least_as_good(task):
    """Balanced needs no more bins than first-fit decreasing; with equally many, its fullest bin is no fuller."""
    capacity, lengths = task
    balanced, decreasing = (get_packer(name, capacity).pack(lengths) for name in ("balanced", "first_fit_decreasing"))
    assert len(balanced) <= len(decreasing)
    if len(balanced) == len(decreasing):
        assert find_largest(lengths, balanced) <= find_largest(lengths, decreasing)


def test_balanced_needs_fewer_bins():
    """The search finds a smaller number of bins than first-fit decreasing needs."""
    lengths = [2, 3, 2, 6, 2, 5]
    assert len(get_packer("first_fit_decreasing", 10).pack(lengths)) == 3
    bins = get_packer("balanced", 10).pack(lengths)
    assert [sum(lengths[index] for index in bin_) for bin_ in bins] == [10, 10]


@given(st.lists(st.integers(1, 40), min_size=3, max_size=9))
def test_balanced_near_the_best(lengths):
    """For a fixed number of bins the fullest is within 7/6 of the optimum, which is found by exhaustive search."""
    bins = get_packer("balanced", sum(lengths), min_bin_count=3).pack(lengths)
    sums = np.array([[0, 0, lengths[-1]]])  # of the three bins, in each of the ways to fill them
    for length in lengths[:-1]:
        sums = np.concatenate([sums + length * (np.arange(3) == number) for number in range(3)])
    best = sums.max(axis=1).min()
    assert len(sums) == 3 ** (len(lengths) - 1)
    assert len(bins) == 3
    assert max(sum(lengths[index] for index in bin_) for bin_ in bins) <= best * 7 / 6


def test_balanced_splits_evenly():
    """An even split is found where longest-first into the emptiest bin gives 17 and 13."""
    lengths = [8, 7, 6, 5, 4]
    bins = get_packer("balanced", 100, min_bin_count=2).pack(lengths)
    assert [sum(lengths[index] for index in bin_) for bin_ in bins] == [15, 15]


def test_balanced_beats_dealing_longest_first():
    """Over many draws, differencing keeps the fullest of 4 bins closer to the mean than the greedy method does."""
    rng = np.random.default_rng(0)
    ours, greedy = [], []
    for _ in range(50):
        lengths = rng.integers(1, 1000, 24).tolist()
        bins = get_packer("balanced", sum(lengths), min_bin_count=4).pack(lengths)
        ours.append(max(sum(lengths[index] for index in bin_) for bin_ in bins))
        sums = [0] * 4
        for length in sorted(lengths, reverse=True):
            sums[sums.index(min(sums))] += length
        greedy.append(max(sums))
        assert ours[-1] <= greedy[-1]
    assert sum(ours) < sum(greedy)


def test_balanced_with_one_that_outweighs_the_rest():
    """Many short sequences beside a very long one are packed without copying a bin for each of them."""
    bins = get_packer("balanced", 2_000_000, min_bin_count=2).pack([1_000_000] + [1] * 400_000)
    assert [len(bin_) for bin_ in bins] == [1, 400_000]
    assert sorted(index for bin_ in bins for index in bin_) == list(range(400_001))


def test_documented_algorithms():
    """The algorithms pack a few lengths as documented."""
    lengths = [6, 5, 4, 3, 2]
    assert get_packer("concatenative", 10).pack(lengths) == [[0], [1, 2], [3, 4]]
    assert get_packer("first_fit_decreasing", 10).pack(lengths) == [[0, 2], [1, 3, 4]]
    assert get_packer("concatenative", 10, min_bin_count=5).pack(lengths) == [[0], [1], [2], [3], [4]]


def test_modified_first_fit_decreasing():
    """The name of NeMo RL stands for first-fit decreasing."""
    lengths = [51, 27, 26, 23, 51, 27, 26, 23]
    bins = [get_packer(name, 100).pack(lengths) for name in ("modified_first_fit_decreasing", "first_fit_decreasing")]
    assert bins[0] == bins[1]


@each_algorithm
@pytest.mark.parametrize(("median", "sigma", "most"), [(512, 1.0, 1.01), (3000, 0.5, 1.08)])
def test_quality(algorithm, median, sigma, most):
    """On log-normal lengths all algorithms except the two naive ones are close to the bound."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(math.log(median), sigma, 65_536).astype(int), 1, 4096)
    bins, bound = len(get_packer(algorithm, 4096).pack(lengths)), -(-int(lengths.sum()) // 4096)
    if algorithm in ("concatenative", "first_fit_shuffle"):
        assert bound / bins > 0.75
    else:
        assert bins <= most * bound


@pytest.mark.parametrize("seed", [None, -1, 1.5, True])
def test_seeds(seed):
    """A seed that does not determine the order is refused."""
    with pytest.raises(ValueError, match="seed must be a whole number of at least 0"):
        get_packer("first_fit_shuffle", 50, seed=seed)


def test_shuffle_is_seeded():
    """The order depends on the seed only."""
    lengths = list(range(1, 40))
    one, same, other = (get_packer("first_fit_shuffle", 50, seed=seed).pack(lengths) for seed in (1, 1, 2))
    state = random.getstate()
    assert one == same != other
    assert random.getstate() == state


@each_algorithm
def test_bad_lengths(algorithm):
    """Lengths that cannot be packed are refused, with the numbers."""
    packer = get_packer(algorithm, 10)
    with pytest.raises(ValueError, match="Sequence 1 has 11 tokens, and a bin holds 10"):
        packer.pack([3, 11, 4])
    with pytest.raises(ValueError, match="Sequence 2 has a negative length: -1"):
        packer.pack([3, 1, -1])
    with pytest.raises(ValueError, match=r"0 sequences cannot fill 2 bins .* min_bin_count=2"):
        get_packer(algorithm, 10, min_bin_count=2).pack([])
    with pytest.raises(ValueError, match="whole numbers, found float64"):
        packer.pack([1.5])
    with pytest.raises(ValueError, match="must fit into int64, found 9223372036854775808"):
        packer.pack(np.array([1, 2**63], np.uint64))
    with pytest.raises(ValueError, match=r"2 sequences cannot fill 4 bins .* bin_count_multiple=4"):
        get_packer(algorithm, 10, bin_count_multiple=4).pack([1, 2])


@each_algorithm
def test_nothing_to_pack(algorithm):
    """No lengths need no bins; a least number of 0 and a name in capitals change nothing."""
    packer = get_packer(algorithm.upper(), 10, min_bin_count=0, bin_count_multiple=2)
    assert packer.algorithm == algorithm
    assert packer.pack([]) == []
    assert packer.pack([3, 4]) == get_packer(algorithm, 10, bin_count_multiple=2).pack([3, 4])


@each_algorithm
def test_small_numbers(algorithm):
    """A capacity of a small integer dtype does not overflow."""
    packer = get_packer(algorithm, np.int8(100), np.int8(2), np.int8(2))
    assert packer == get_packer(algorithm, 100, 2, 2)
    assert len(packer.pack([99, 98, 97, 96])) == 4


def test_bad_arguments():
    """Unknown algorithms and numbers below 1 are refused."""
    with pytest.raises(ValueError, match="Unknown packing algorithm 'best'; there are: balanced, concatenative"):
        get_packer("best", 10)
    with pytest.raises(ValueError, match="bin_capacity must be at least 1, got 0"):
        get_packer("balanced", 0)
    with pytest.raises(ValueError, match="bin_count_multiple must be at least 1, got -2"):
        get_packer("balanced", 10, bin_count_multiple=-2)
    with pytest.raises(TypeError, match=r"bin_capacity must be a whole number, got 1\.5"):
        get_packer("balanced", 1.5)
    with pytest.raises(ValueError, match="min_bin_count must be at least 0, got -1"):
        get_packer("balanced", 10, -1)
    with pytest.raises(TypeError, match=r"whole number, got False\. There is no collect_metrics"):
        get_packer("balanced", 10, False)
