# SPDX-License-Identifier: Apache-2.0
"""Lookup of ranks, coordinates and groups, and errors for unknown ones."""

import numpy as np
import pytest

from fairlead_sharding import NamedSharding

SHARDING = NamedSharding.from_shape(dp=2, tp=4)
INVALID_AXIS = r"Invalid axis name: 'x'\. Valid names are: \['dp', 'tp'\]"


@pytest.mark.parametrize(
    "call",
    [
        lambda: SHARDING.get_axis_index("x"),
        lambda: SHARDING.get_axis_size("x"),
        lambda: SHARDING.get_ranks_by_coord(x=0),
        lambda: SHARDING.get_ranks_by_coord(dp=9, x=0),
        lambda: SHARDING.get_ranks_by_coord(dp="bad", x=0),
        lambda: SHARDING.get_ranks(x=0),
        lambda: SHARDING.get_ranks(dp=-9, x=0),
        lambda: SHARDING.at(x=0),
        lambda: SHARDING.at(dp=9, x=slice(None)),
        lambda: SHARDING.groups("x"),
        lambda: SHARDING.groups("dp", "x"),
        lambda: SHARDING.peers(0, "x"),
        lambda: SHARDING.piece_index("x"),
        lambda: SHARDING.leaders("x"),
        lambda: SHARDING.plan("x"),
        lambda: SHARDING.plan(["dp", "x"]),
        lambda: SHARDING.plan(replicate_on_axes=["x"]),
        lambda: SHARDING.plan(output_is_replicated=["x"]),
    ],
)
def test_unknown_axis(call):
    """An unknown axis is a ValueError that lists the known ones, even if other arguments are wrong too."""
    with pytest.raises(ValueError, match=INVALID_AXIS):
        call()


@pytest.mark.parametrize("axis", [0, None, ("dp",), ["dp"]])
def test_an_axis_is_named_by_a_string(axis):
    """A name that is not a string, hashable or not, is an unknown axis."""
    for call in (SHARDING.get_axis_index, SHARDING.groups, SHARDING.piece_index):
        with pytest.raises(ValueError, match="Invalid axis name"):
            call(axis)
    with pytest.raises(ValueError, match="Invalid axis name"):
        SHARDING.plan([axis])


@pytest.mark.parametrize("axes", [None, 0, True])
def test_axes_are_a_name_or_several(axes):
    """Axes may be one name or several names, and nothing else."""
    with pytest.raises(ValueError, match=f"Axes must be a name or several, got {axes}"):
        SHARDING.plan(axes)
    with pytest.raises(ValueError, match=f"Axes must be a name or several, got {axes}"):
        NamedSharding.is_axis_zero({}, axes)


@pytest.mark.parametrize(
    "call",
    [
        lambda: SHARDING.groups("dp", "dp"),
        lambda: SHARDING.peers(0, "dp", "dp"),
        lambda: SHARDING.piece_index("dp", "dp"),
        lambda: SHARDING.plan(["dp", "dp"]),
    ],
)
def test_an_axis_named_twice(call):
    """Naming an axis twice is refused."""
    with pytest.raises(ValueError, match=r"An axis is named twice: \['dp', 'dp'\]"):
        call()


@pytest.mark.parametrize("rank", [9, 8, -1, 10**30, 1.0, "1", None, True, [0]])
@pytest.mark.parametrize(
    "sharding", [SHARDING, NamedSharding([[3, 2, 1, 0], [7, 6, 5, 4]], ["dp", "tp"])], ids=["counting", "permuted"]
)
def test_unknown_rank(sharding, rank):
    """An unknown or invalid rank is a ValueError that names it."""
    for call in (sharding.get_worker_coords, lambda r: sharding.peers(r, "dp")):
        with pytest.raises(ValueError) as caught:
            call(rank)
        assert str(caught.value) == f"Worker ID {rank} not found in sharding layout."


@pytest.mark.parametrize("rank", [6, np.int64(6), np.uint8(6)])
def test_coords(rank):
    """Coordinates are plain integers; a rank may be an integer of any library."""
    coords = SHARDING.get_worker_coords(rank)

    assert coords == {"dp": 1, "tp": 2}
    assert all(type(value) is int for value in coords.values())


def test_sparse_ranks():
    """Sparse ranks need no more memory than dense ones."""
    sharding = NamedSharding([[10**15, 7], [0, 2**62]], ["dp", "tp"])

    assert sharding.get_worker_coords(10**15) == {"dp": 0, "tp": 0}
    assert sharding.get_worker_coords(2**62) == {"dp": 1, "tp": 1}
    assert sharding.plan("dp").called.tolist() == [0, 10**15]


def test_get_ranks_by_coord():
    """Axes that are not named match all, the result is sorted, and a coordinate outside its axis matches nothing."""
    sharding = NamedSharding([[5, 4, 3], [2, 1, 0]], ["dp", "tp"])

    assert sharding.get_ranks_by_coord() == [0, 1, 2, 3, 4, 5]
    assert sharding.get_ranks_by_coord(dp=0) == [3, 4, 5]
    assert sharding.get_ranks_by_coord(tp=np.int32(2), dp=1) == [0]
    assert sharding.get_ranks_by_coord(dp=2) == sharding.get_ranks_by_coord(tp=-1, dp=0) == []
    assert all(type(rank) is int for rank in sharding.get_ranks_by_coord(dp=0))


def test_get_ranks():
    """The result is the sharding of the remaining axes, or the rank."""
    assert SHARDING.get_ranks(dp=1) == NamedSharding([4, 5, 6, 7], ["tp"])
    assert SHARDING.get_ranks() == SHARDING
    assert SHARDING.get_ranks(dp=1, tp=2) == 6
    assert type(SHARDING.get_ranks(dp=1, tp=2)) is int


@pytest.mark.parametrize("coordinate", [4, -1, 10**30])
def test_get_ranks_outside(coordinate):
    """get_ranks() refuses a coordinate outside its axis."""
    with pytest.raises(IndexError, match=f"Coordinate {coordinate} is outside axis 'tp' of size 4"):
        SHARDING.get_ranks(tp=coordinate)


@pytest.mark.parametrize("coordinate", [1.0, "1", None, True, slice(None)])
def test_a_coordinate_is_an_integer(coordinate):
    """Coordinates that are not integers are refused, booleans too."""
    for call in (SHARDING.get_ranks, SHARDING.get_ranks_by_coord):
        with pytest.raises(ValueError, match="The coordinate along axis 'tp' must be an integer, got"):
            call(tp=coordinate)


def test_is_axis_zero():
    """is_axis_zero() is true if every named axis is at 0; a missing one counts as 0."""
    coords = {"dp": 1, "tp": 0}

    assert NamedSharding.is_axis_zero(coords, ["tp"])
    assert NamedSharding.is_axis_zero(coords, ["tp", "pp"])
    assert NamedSharding.is_axis_zero(coords, [])
    assert not NamedSharding.is_axis_zero(coords, ["tp", "dp"])
    assert not NamedSharding.is_axis_zero(coords, "dp")


def test_groups():
    """Groups are plain lists of plain integers, as torch.distributed.new_group takes them."""
    assert SHARDING.groups("tp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert SHARDING.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert SHARDING.groups("tp", "dp") == [[0, 4, 1, 5, 2, 6, 3, 7]]
    assert SHARDING.groups() == [[0], [1], [2], [3], [4], [5], [6], [7]]
    assert all(type(rank) is int for group in SHARDING.groups("dp") for rank in group)
