# SPDX-License-Identifier: Apache-2.0
"""Views: selections of the same ranks."""

import numpy as np
import pytest

from fairlead_sharding import NamedSharding

SHARDING = NamedSharding.from_shape(dp=4, tp=2)


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
    view = SHARDING.at(dp=slice(2, None))

    assert view.get_worker_coords(6) == {"dp": 1, "tp": 0}
    assert view.plan("dp", replicate_on_axes="tp").called.tolist() == [4, 5, 6, 7]
    assert view.plan("dp", replicate_on_axes="tp").piece.tolist() == [0, 0, 1, 1]
    assert view == NamedSharding.from_shape(dp=2, tp=2, start=4)
