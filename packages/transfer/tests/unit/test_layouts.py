# SPDX-License-Identifier: Apache-2.0
"""Layouts are checked when they are made, and what does not fit together is refused in one error."""

import pickle

import numpy as np
import pytest

from fairlead_sharding import NamedSharding
from fairlead_transfer import Layout, LayoutMismatchError, Mismatch, reshard

MESH = NamedSharding.from_shape(dp=2, tp=2)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (((4,), [[0]], [[5]]), ValueError, "outside of the shape"),
        (((4,), [[-1]], [[2]]), ValueError, "outside of the shape"),
        (((4,), [[0, 0]], [[1, 1]]), ValueError, r"must have the shape \(ranks, 1\)"),
        (((4,), [[0], [0]], [[1]]), ValueError, "one box per rank"),
        (((4,), [[0.5]], [[1]]), TypeError, "whole numbers"),
        (((4.0,), [[0]], [[1]]), TypeError, "whole numbers"),
        (((-4,), [[0]], [[1]]), ValueError, "must not be negative"),
        (((4,), [[0]], [[1]], 0), ValueError, "at least 1 byte"),
        (((4,), np.empty((0, 1), int), np.empty((0, 1), int)), ValueError, "must have the shape"),
    ],
)
def test_bad_boxes(arguments, error, text):
    """A box outside the tensor, or an array of another form, is refused with the values."""
    with pytest.raises(error, match=text):
        Layout(*arguments)


@pytest.mark.parametrize(
    ("dims", "text"),
    [({2: "dp"}, "do not exist"), ({0: "dp", 1: "dp"}, "one dim only"), ({0: "pp"}, "Invalid axis name")],
)
def test_bad_dims(dims, text):
    """An axis or a dim that does not exist, or an axis for two dims, is refused."""
    with pytest.raises(ValueError, match=text):
        Layout.from_sharding((4, 4), MESH, dims)


def test_other_ranks():
    """A layout is for the ranks 0 to n - 1."""
    with pytest.raises(ValueError, match="ranks 0 to 1"):
        Layout.from_sharding((4,), NamedSharding([5, 6], ["dp"]), {0: "dp"})


def test_nested_and_uneven():
    """Chunks are those of `torch.chunk`, and the order of the axes decides which chunks are split again."""
    strided = Layout.from_sharding((7,), MESH, {0: ("tp", "dp")})
    assert strided.offsets.ravel().tolist() == [0, 4, 2, 6]
    assert strided.sizes.ravel().tolist() == [2, 2, 2, 1]
    few = Layout.from_sharding((2,), NamedSharding.from_shape(dp=3), {0: "dp"})
    assert few.sizes.ravel().tolist() == [1, 1, 0]


def test_ranks_in_another_order():
    """The mesh may hold its ranks in any order."""
    layout = Layout.from_sharding((4,), NamedSharding([[3, 1], [2, 0]], ["dp", "tp"]), {0: "tp"})
    assert layout.offsets.ravel().tolist() == [2, 2, 0, 0]


def test_equality():
    """Equal boxes are equal layouts, with equal hashes, also after pickling; they cannot be changed."""
    one, other = (Layout.from_sharding((4, 4), MESH, {0: "dp"}) for _ in range(2))
    assert one == other == pickle.loads(pickle.dumps(one))
    assert len({one, other}) == 1
    assert one != Layout.from_sharding((4, 4), MESH, {0: "tp"})
    assert one != Layout.from_sharding((4, 4), MESH, {0: "dp"}, itemsize=2)
    assert one != "another type"
    with pytest.raises(ValueError, match="read-only"):
        one.offsets[0, 0] = 1


def test_mismatches_are_listed_together():
    """Missing names, other shapes, other item sizes and elements that nobody holds are refused in one error."""
    half = Layout((4,), [[0]], [[2]])
    with pytest.raises(LayoutMismatchError) as caught:
        reshard(
            {"a": Layout.replicated((4,), 1), "b": Layout.replicated((4,), 1), "c": Layout.replicated((4,), 1)},
            {"b": Layout.replicated((5,), 1), "c": Layout.replicated((4,), 1, itemsize=2), "d": half},
            source_nodes="x",
            target_nodes="x",
        )
    reasons = {one.name: one.reason for one in caught.value.mismatches}
    assert "only the source has it" in reasons["a"]
    assert "the global shapes differ, (4,) and (5,)" in reasons["b"]
    assert "LocalTensor" in reasons["b"]
    assert "item sizes differ" in reasons["c"]
    assert "only the target has it" in reasons["d"]
    assert all(
        word in str(caught.value) for word in ("rename=", "exclude=", "dtype=", "4 tensors", "nothing has been applied")
    )
    with pytest.raises(LayoutMismatchError, match="no source rank holds 2 of the elements"):
        reshard(half, Layout.replicated((4,), 1), source_nodes="x", target_nodes="x")


def test_many_mismatches_stay_readable():
    """Of many tensors that do not fit, the message shows the first ones and the number."""
    error = LayoutMismatchError(tuple(Mismatch(f"t{number}", "", "", "no") for number in range(1000)))
    assert len(str(error).splitlines()) < 60
    assert "and 960 more" in str(error)
    assert pickle.loads(pickle.dumps(error)).mismatches == error.mismatches


def test_nodes():
    """There is one node for each rank."""
    layout = Layout.replicated((4,), 2)
    with pytest.raises(ValueError, match="is for 2 ranks, but source_nodes has 1"):
        reshard(layout, layout, source_nodes="a", target_nodes="ab")


def test_tables():
    """A plan shows its sets of tensors as text."""
    plan = reshard(
        {"<w>": Layout.replicated((1024, 1024), 2)},
        {"<w>": Layout.replicated((1024, 1024), 1)},
        source_nodes="ab",
        target_nodes="c",
    )
    assert "1.0 MB moved" in str(plan)
    assert "<w>" in str(plan)
