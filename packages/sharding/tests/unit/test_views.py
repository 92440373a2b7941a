# SPDX-License-Identifier: Apache-2.0
"""Views: other shapes and other selections of the same ranks."""

import numpy as np
import pytest

from fairlead_sharding import NamedSharding

SHARDING = NamedSharding.from_shape(dp=4, tp=2)


def test_flatten():
    """Axes merge row-major in the order given, at the position of the outermost; by default all axes merge."""
    sharding = NamedSharding.from_shape(a=2, b=2, c=2)

    assert sharding.flatten("bc", "b", "c") == NamedSharding.from_shape(a=2, bc=4)
    assert sharding.flatten("ca", "c", "a") == NamedSharding([[0, 2], [4, 6], [1, 3], [5, 7]], ["ca", "b"])
    assert sharding.flatten("all") == NamedSharding.from_shape(all=8)
    assert sharding.flatten("b", "b").names == ["a", "b", "c"]
    with pytest.raises(ValueError, match="Duplicate axis name: 'a'"):
        sharding.flatten("a", "b", "c")
    with pytest.raises(ValueError, match="non-empty strings, got ''"):
        sharding.flatten("", "b", "c")


def test_split():
    """One axis becomes several, row-major; -1 is the remaining size."""
    assert SHARDING.split("dp", a=2, b=2) == NamedSharding.from_shape(a=2, b=2, tp=2)
    assert SHARDING.split("dp", a=-1, b=2) == SHARDING.split("dp", a=2, b=-1)
    assert SHARDING.split("dp", dp=2, b=2).names == ["dp", "b", "tp"]
    assert SHARDING.split("dp", a=2, b=2).flatten("dp", "a", "b") == SHARDING


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "Splitting axis 'dp' needs at least one new axis"),
        ({"a": 3}, r"Axis 'dp' of size 4 cannot be split into \{'a': 3\}"),
        ({"a": 3, "b": -1}, r"Axis 'dp' of size 4 cannot be split into \{'a': 3, 'b': -1\}"),
        ({"a": 8, "b": -1}, "cannot be split"),
        ({"a": -1, "b": -1}, "Only one size may be -1"),
        ({"a": 0, "b": -1}, r"The size of axis 'a' \(or -1 for what remains\) must be at least 1, got 0"),
        ({"a": -4, "b": -1}, "must be at least 1, got -4"),
        ({"a": True, "b": 4}, "must be an integer, got True"),
        ({"a": 2.0, "b": 2}, r"must be an integer, got 2\.0"),
        ({"tp": 2, "b": 2}, "Duplicate axis name: 'tp'"),
    ],
)
def test_bad_split(sizes, message):
    """Sizes that do not match are refused by name."""
    with pytest.raises(ValueError, match=message):
        SHARDING.split("dp", **sizes)


def test_rename():
    """Axes are renamed all at once, so names can be swapped."""
    assert SHARDING.rename(dp="tp", tp="dp").shape == {"tp": 4, "dp": 2}
    assert SHARDING.rename() == SHARDING
    with pytest.raises(ValueError, match="Duplicate axis name: 'tp'"):
        SHARDING.rename(dp="tp")
    with pytest.raises(ValueError, match="non-empty strings, got 1"):
        SHARDING.rename(dp=1)


def test_transpose():
    """Every axis must be named."""
    assert SHARDING.transpose("tp", "dp").groups("dp") == SHARDING.groups("dp")
    assert SHARDING.transpose("tp", "dp").transpose("dp", "tp") == SHARDING
    with pytest.raises(ValueError, match=r"needs every axis of \['dp', 'tp'\] once, got \['tp'\]"):
        SHARDING.transpose("tp")


def test_at():
    """An integer drops the axis, a slice keeps it, an integer everywhere leaves an int."""
    assert SHARDING.at(dp=1) == NamedSharding([2, 3], ["tp"])
    assert SHARDING.at(dp=slice(1, 2)) == NamedSharding([[2, 3]], ["dp", "tp"])
    assert SHARDING.at(dp=slice(None, None, -2), tp=-1) == NamedSharding([7, 3], ["dp"])
    assert SHARDING.at() == SHARDING
    assert SHARDING.at(dp=np.int64(-1), tp=0) == 6
    assert type(SHARDING.at(dp=0, tp=0)) is int


@pytest.mark.parametrize("coordinate", [4, -5, 10**30])
def test_at_outside(coordinate):
    """As in numpy an integer outside its axis is an IndexError."""
    with pytest.raises(IndexError, match=f"Coordinate {coordinate} is outside axis 'dp' of size 4"):
        SHARDING.at(dp=coordinate)


@pytest.mark.parametrize("nothing", [slice(2, 2), slice(9, None), slice(0, 4, -1)])
def test_at_with_an_empty_selection(nothing):
    """An empty selection is an error, unlike in numpy."""
    with pytest.raises(ValueError, match=r"slice\(.*\) selects nothing of axis 'dp' of size 4"):
        SHARDING.at(dp=nothing)


@pytest.mark.parametrize("bad", [True, 1.0, "0", None, [0, 1], np.array([0, 1]), ...])
def test_at_takes_integers_and_slices(bad):
    """Only basic indexing; a boolean is no integer here."""
    with pytest.raises(ValueError, match="The coordinate along axis 'dp' must be an integer, got"):
        SHARDING.at(dp=bad)


@pytest.mark.parametrize("bad", [slice(0, 4, 0), slice(0.5), slice("a", "b")])
def test_at_bad_slice(bad):
    """A slice that numpy could not apply either is named together with its axis."""
    with pytest.raises(ValueError, match=r"slice\(.*\) cannot be applied to axis 'dp': "):
        SHARDING.at(dp=bad)


def test_views_of_views():
    """A view is a full sharding: its ranks keep their ids, and it can make plans."""
    view = SHARDING.at(dp=slice(2, None)).transpose("tp", "dp")

    assert view.get_worker_coords(6) == {"tp": 0, "dp": 1}
    assert view.plan("dp", replicate_on_axes="tp").called.tolist() == [4, 5, 6, 7]
    assert view.plan("dp", replicate_on_axes="tp").piece.tolist() == [0, 0, 1, 1]
    assert view.flatten("x", "dp", "tp") == NamedSharding.from_shape(x=4, start=4)
