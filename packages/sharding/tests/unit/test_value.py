# SPDX-License-Identifier: Apache-2.0
"""A sharding and a plan are values: immutable, equal when made alike, and portable."""

import copy
import json
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fairlead_sharding import NamedSharding

KINDS = [
    NamedSharding.from_shape(dp=2, tp=4),
    NamedSharding.from_shape(dp=2, tp=4, start=100),
    NamedSharding([[3, 1], [2, 0]], ["dp", "tp"]),
    NamedSharding([10**15, 0, 2**63 - 1], ["x"]),
    NamedSharding.from_shape(dp=4, tp=2).at(dp=slice(None, None, 2)),
]


def test_immutable():
    """Attributes cannot be set or deleted, and returned values are copies or read-only."""
    source = np.arange(4).reshape(2, 2)
    sharding = NamedSharding(source, ["dp", "tp"])
    source[0, 0] = 99
    sharding.layout[0, 0] = 99
    sharding.names.append("x")
    sharding.shape["dp"] = 99

    assert sharding == NamedSharding.from_shape(dp=2, tp=2)
    for name in ("names", "_layout", "new"):
        with pytest.raises(AttributeError, match=f"A NamedSharding is immutable: '{name}' cannot be set or deleted"):
            setattr(sharding, name, None)
        with pytest.raises(AttributeError, match="immutable"):
            delattr(sharding, name)
    for array in (sharding.piece_index("dp"), sharding.leaders("dp")):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_equality_and_hash():
    """Equal layout and names make equal shardings with equal hashes, however they were made."""
    one, other = NamedSharding([[0, 1], [2, 3]], ["dp", "tp"]), NamedSharding.from_shape(dp=2, tp=2)
    permuted = NamedSharding([[1, 0], [2, 3]], ["dp", "tp"])

    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other, permuted, NamedSharding(permuted.layout, ["dp", "tp"])}) == 2
    assert one != permuted
    assert one != NamedSharding.from_shape(pp=2, tp=2)
    assert one != NamedSharding.from_shape(dp=4)
    assert one != NamedSharding.from_shape(dp=2, tp=2, start=4)
    assert one != "a sharding"


@pytest.mark.parametrize("sharding", KINDS, ids=repr)
def test_round_trips(sharding):
    """Pickling, copying and plain data (through JSON too) give an equal sharding back."""
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(sharding, protocol)) == sharding
    assert copy.copy(sharding) == copy.deepcopy(sharding) == sharding
    assert NamedSharding.from_dict(sharding.to_dict()) == sharding
    assert NamedSharding.from_dict(json.loads(json.dumps(sharding.to_dict()))) == sharding


def test_small_when_pickled():
    """Ranks that count up are pickled as their shape, without cached plans."""
    sharding = NamedSharding.from_shape(dp=1024, pp=8, tp=8, start=10**9)
    before = pickle.dumps(sharding)
    plan = sharding.plan("dp", replicate_on_axes=["pp", "tp"])
    hash(sharding)

    assert pickle.dumps(sharding) == before
    assert len(before) < 300
    assert len(pickle.dumps(plan)) < 500
    assert len(pickle.dumps(sharding.at(tp=0))) < 6 * 8192


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "lacks 'shape'"),
        ({"shape": [2], "start": 0}, "lacks 'names'; it has"),
        ({"shape": [2], "names": ["x"]}, "lacks 'ranks'"),
        ({"shape": [2, 2], "names": ["x"], "start": 0}, "Number of dimensions"),
        ({"shape": [], "names": [], "start": 0}, "no dimensions"),
        ({"shape": [0], "names": ["x"], "start": 0}, "at least 1, got 0"),
        ({"shape": [-1], "names": ["x"], "ranks": [0, 1]}, "at least 1, got -1"),
        ({"shape": [2], "names": ["x"], "start": -1}, "The first rank must be at least 0, got -1"),
        ({"shape": [2], "names": ["x"], "ranks": [0, 1, 2]}, "cannot reshape"),
        ({"shape": [2], "names": ["x"], "ranks": [0, True]}, "only integer rank IDs"),
        ({"shape": [2], "names": ["x"], "ranks": [1, 1]}, "Duplicate ranks found"),
        ({"shape": [2], "names": ["x"], "start": 0, "ranks": [1, 0]}, "has start and ranks: give one of them"),
        ({"shape": [10**12], "names": ["x"], "start": 0}, r"at most 67108864 ranks, but shape \(1000000000000,\)"),
        ({"shape": [10**4] * 3, "names": ["x", "y", "z"], "start": 0}, "at most 67108864 ranks, .* has 1000000000000"),
        ({"shape": 2, "names": ["x"], "start": 0}, "not the dict of a sharding .*not iterable"),
        ([2, 0], "not the dict of a sharding .*indices must be integers"),
    ],
)
def test_bad_dict(data, message):
    """Plain data is checked like any other input."""
    with pytest.raises(ValueError, match=message):
        NamedSharding.from_dict(data)


def test_plans_are_cached():
    """Equal arguments return the same plan, whether axes are a name, a list or a tuple."""
    sharding = NamedSharding.from_shape(dp=2, tp=2)
    plan = sharding.plan(["dp"], ["tp"])

    assert sharding.plan(("dp",), ("tp",)) is plan
    assert sharding.plan("dp", "tp", make_dummy_calls_to_free_axes=0) is plan
    assert sharding.plan("tp", "dp") is not plan
    assert sharding.piece_index("dp") is sharding.piece_index("dp")
    assert sharding.leaders("dp") is sharding.leaders("dp")


def test_caches_are_bounded():
    """The caches are bounded."""
    names = [f"axis{i}" for i in range(8)]
    sharding = NamedSharding(np.arange(2**8).reshape([2] * 8), names)
    for first in names:
        for second in names:
            if first != second:
                sharding.plan([first, second])

    assert sharding._plan.cache_info().currsize <= 16
    assert sharding._piece_index.cache_info().currsize <= 16


def test_threads():
    """Threads may share a sharding from the first use on; cached values are right in each."""
    rng = np.random.default_rng(0)
    for layout in (np.arange(4096), rng.permutation(4096)):
        sharding = NamedSharding(layout.reshape(64, 8, 8), ["dp", "pp", "tp"])

        def use(axis, sharding=sharding):
            plan = sharding.plan(axis, output_is_replicated=axis)
            return plan.called.tolist(), sharding.get_worker_coords(17), hash(sharding)

        axes = ["dp", "pp", "tp"] * 20
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(use, axes))
        assert results == [use(axis) for axis in axes]


def test_plan_is_a_value():
    """Plans with equal arguments are equal, survive pickling, and have read-only arrays."""
    sharding = NamedSharding([[3, 1], [2, 0]], ["dp", "tp"])
    plan = sharding.plan("dp", replicate_on_axes="tp")
    twin = pickle.loads(pickle.dumps(plan))

    assert twin == plan == NamedSharding([[3, 1], [2, 0]], ["dp", "tp"]).plan("dp", "tp")
    assert hash(twin) == hash(plan)
    assert plan != sharding.plan("tp", "dp")
    for name in ("called", "piece", "answers", "returned"):
        assert np.array_equal(getattr(twin, name), getattr(plan, name))
        with pytest.raises(ValueError, match="read-only"):
            getattr(plan, name)[0] = 0
    with pytest.raises(AttributeError):
        plan.n_pieces = 3
