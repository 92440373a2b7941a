# SPDX-License-Identifier: Apache-2.0
"""Valid and invalid layouts, and the messages of the errors."""

import array
import re

import numpy as np
import pytest

from fairlead_sharding import NamedSharding

LARGEST = 2**63 - 1


@pytest.mark.parametrize(
    "layout",
    [
        [[0, 1], [2, 3]],
        ((0, 1), (2, 3)),
        [range(2), range(2, 4)],
        [array.array("i", [0, 1]), array.array("i", [2, 3])],
        [np.array([0, 1]), np.array([2, 3])],
        [[np.int8(0), np.uint64(1)], [2, 3.0]],
        np.array([[0, 1], [2, 3]]),
        np.array([[0, 1], [2, 3]], dtype=np.uint8),
        np.array([[0, 1], [2, 3]], dtype=np.uint64),
        np.array([[0, 1], [2, 3]], dtype=np.float16),
        np.array([[0, 1], [2, 3]], dtype=object),
        np.array([[0, 2], [1, 3]]).T,
        np.array([[0, 1], [2, 3]], dtype=">i4"),
        [[0.0, 1.0], [2.0, 3.0]],
    ],
    ids=lambda layout: f"{type(layout).__name__}-{getattr(layout, 'dtype', '')}",
)
def test_equal_ranks_make_equal_shardings(layout):
    """Layouts of any type are equal if they hold the same integers; whole floats are integers."""
    sharding = NamedSharding(layout, ["dp", "tp"])

    assert sharding == NamedSharding.from_shape(dp=2, tp=2)
    assert sharding.layout.dtype == np.int64
    assert sharding.layout.tolist() == [[0, 1], [2, 3]]


def test_properties():
    """The facts are plain values, outermost axis first."""
    sharding = NamedSharding(np.arange(8).reshape(1, 2, 4), ["pp", "dp", "tp"])

    assert sharding.shape == {"pp": 1, "dp": 2, "tp": 4}
    assert list(sharding.shape) == sharding.names == ["pp", "dp", "tp"]
    assert (sharding.ndim, sharding.size) == (3, 8)
    assert [sharding.get_axis_index(name) for name in sharding.names] == [0, 1, 2]
    assert [sharding.get_axis_size(name) for name in sharding.names] == [1, 2, 4]


def test_the_largest_rank():
    """The largest int64 is a valid rank in any type."""
    for layout in ([LARGEST, 0], np.array([LARGEST, 0]), np.array([LARGEST, 0], dtype=np.uint64)):
        sharding = NamedSharding(layout, ["x"])
        assert sharding.get_worker_coords(LARGEST) == {"x": 0}
        assert sharding.groups("x") == [[LARGEST, 0]]

    assert NamedSharding.from_shape(x=1, start=LARGEST).layout.tolist() == [LARGEST]


def test_integers_beside_floats_stay_exact():
    """One float among the ranks does not convert the others to floats, which would lose bits."""
    assert NamedSharding([2**53 + 1, 0.0], ["x"]).layout.tolist() == [2**53 + 1, 0]


@pytest.mark.parametrize("layout", [[[0, 1], [2]], [[0], 1], [np.zeros((2, 2)), np.zeros((2, 3))]])
def test_ragged(layout):
    """A ragged layout is refused with numpy's message."""
    with pytest.raises(ValueError, match=r"Could not create NumPy array from layout: .+"):
        NamedSharding(layout, ["a", "b"])


@pytest.mark.parametrize(
    ("layout", "found"),
    [
        ([True, False], "True"),
        ([0, True], "True"),
        ([0.0, True], "True"),
        (np.array([True, False]), "an array of bool"),
        (np.array([0, np.bool_(True)], dtype=object), "True"),
        (["0", "1"], "'0'"),
        ([0, "1"], "'1'"),
        (np.array(["0", "1"]), "an array of <U1"),
        ([b"0"], "b'0'"),
        ("01", "'01'"),
        ([0.5, 1], "0.5"),
        (np.array([0, 1.5]), "1.5"),
        ([float("nan")], "nan"),
        ([float("inf")], "inf"),
        (np.array([0, np.nan]), "nan"),
        (np.array([0, np.inf]), "inf"),
        ([1j], "1j"),
        (np.array([1j]), "an array of complex128"),
        ([None, 1], "None"),
        ({0, 1}, "{0, 1}"),
        (np.array(["2024-01-01"], dtype="M8[D]"), "an array of datetime64[D]"),
    ],
    ids=repr,
)
def test_not_integers(layout, found):
    """A value that is not an integer is named, alone, among integers, or as an array."""
    message = f"Layout must contain only integer rank IDs, got .*{re.escape(found)}"
    with pytest.raises(ValueError, match=message):
        NamedSharding(layout, ["x"])


@pytest.mark.parametrize(
    "layout",
    [
        [0, 2**63],
        [0, 10**30],
        [0, 2.0**63],
        [0, 1e300],
        np.array([0, 2**63], dtype=np.uint64),
        np.array([0, 2**64 - 1], dtype=np.uint64),
        np.array([0, 2.0**63]),
        np.array([0, 2**63], dtype=object),
        [np.uint64(2**63)],
        [0, -(10**30)],
    ],
    ids=repr,
)
def test_beyond_int64(layout):
    """A rank that int64 cannot hold is refused, never wrapped."""
    with pytest.raises(ValueError, match=r"Rank .* is beyond int64, whose largest value is 9223372036854775807"):
        NamedSharding(layout, ["x"])


def test_a_range_beyond_int64():
    """Ranks that count up beyond int64 are refused."""
    with pytest.raises(ValueError, match="Rank 9223372036854775808 is beyond int64"):
        NamedSharding.from_shape(dp=2, tp=2, start=2**63 - 3)
    with pytest.raises(ValueError, match="is beyond int64"):
        NamedSharding.from_shape(dp=10**30)


def test_more_ranks_than_memory():
    """A shape that is far too large is refused before memory is allocated."""
    with pytest.raises(ValueError, match=r"at most 67108864 ranks, but shape \(1000000, 1000000\) has 1000000000000"):
        NamedSharding.from_shape(dp=10**6, tp=10**6)


@pytest.mark.parametrize("layout", [[0, -3], np.array([0, -3]), [0, -3.0]])
def test_negative(layout):
    """Negative ranks are refused."""
    with pytest.raises(ValueError, match="must not contain negative rank IDs, got -3"):
        NamedSharding(layout, ["x"])


@pytest.mark.parametrize("layout", [[], [[], []], np.zeros((2, 0), dtype=int), ()])
def test_empty(layout):
    """A sharding has at least one rank."""
    with pytest.raises(ValueError, match=r"Layout is empty \(shape .*\)"):
        NamedSharding(layout, ["x"])


@pytest.mark.parametrize("layout", [3, np.array(3), np.int64(3)])
def test_without_dimensions(layout):
    """A single number is not a layout, even without names."""
    with pytest.raises(ValueError, match="Layout has no dimensions: put the single rank 3 into a list"):
        NamedSharding(layout, [])


@pytest.mark.parametrize("names", [[], ["a"], ["a", "b", "c"]])
def test_dimension_mismatch(names):
    """There is one name per dimension."""
    message = rf"Number of dimensions in layout \(2\) must match the number of names \({len(names)}\)"
    with pytest.raises(ValueError, match=message):
        NamedSharding([[0, 1]], names)


def test_duplicates():
    """Duplicate ranks are refused, and the message names some of them."""
    with pytest.raises(ValueError, match=r"Duplicate ranks found in layout: 1, 7\. Each rank must appear"):
        NamedSharding([[7, 1, 1], [1, 7, 0]], ["a", "b"])
    with pytest.raises(ValueError, match=r"Duplicate ranks found in layout: 0, 1, 2, 3, 4, 5, 6, 7, \.\.\."):
        NamedSharding([*range(100), *range(100)], ["a"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "a"], r"Duplicate axis name: 'a' in \['a', 'a'\]"),
        (["a", ""], r"Axis names must be non-empty strings, got ''"),
        (["a", 1], r"Axis names must be non-empty strings, got 1"),
        (["a", None], r"Axis names must be non-empty strings, got None"),
        ([["a"], "b"], r"Axis names must be non-empty strings, got \['a'\]"),
        ("ab", r"Axis names must be a sequence of strings, got 'ab'"),
        (None, r"Axis names must be a sequence of strings, got None"),
    ],
)
def test_bad_names(names, message):
    """Names are distinct, non-empty strings; one string is not a sequence of one-letter names."""
    with pytest.raises(ValueError, match=message):
        NamedSharding([[0, 1]], names)


def test_any_string_is_a_name():
    """A name may equal that of a parameter, and need not be an identifier."""
    sharding = NamedSharding([[[0, 1], [2, 3]]], ["self", "axis name", "start"])

    assert sharding.get_ranks_by_coord(**{"axis name": 1, "self": 0}) == [2, 3]
    assert sharding.at(self=0, start=1).layout.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "at least one axis"),
        ({"dp": 0}, "The size of axis 'dp' must be at least 1, got 0"),
        ({"dp": -1}, "The size of axis 'dp' must be at least 1, got -1"),
        ({"dp": 2.0}, r"The size of axis 'dp' must be an integer, got 2\.0"),
        ({"dp": True}, "The size of axis 'dp' must be an integer, got True"),
        ({"dp": "2"}, "The size of axis 'dp' must be an integer, got '2'"),
        ({"dp": 2, "start": -1}, "The first rank must be at least 0, got -1"),
        ({"dp": 2, "start": 0.5}, r"The first rank must be an integer, got 0\.5"),
        ({"": 2}, "Axis names must be non-empty strings"),
    ],
)
def test_bad_shape(sizes, message):
    """Sizes and the first rank are checked like everything else."""
    with pytest.raises(ValueError, match=message):
        NamedSharding.from_shape(**sizes)
