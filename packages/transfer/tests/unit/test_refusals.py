# SPDX-License-Identifier: Apache-2.0
"""Tensors that a link refuses, with the reason."""

import numpy as np
import pytest

from fairlead_transfer import LayoutMismatchError, LocalTensor
from fairlead_transfer._descriptions import Selection, check_dtypes, make_selection, read_side

from ..ends import Ends, Worker


@pytest.mark.parametrize(
    ("values", "name", "text"),
    [
        ([1, 2], "", "must return a dict"),
        ({1: np.ones(2)}, "1", "must be a str"),
        ({"a": "text"}, "a", "builtins.str cannot be transferred"),
        ({"a": np.array(["x"], object)}, "a", "dtype object cannot"),
        ({"a": np.ma.array([1.0], mask=[True])}, "a", "masked array"),
        ({"a": LocalTensor(np.ones(2), (4,), (3,))}, "a", "outside of the global shape"),
        ({"a": LocalTensor(np.ones(2), (4, 4), (3,))}, "a", "has global_shape"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(values, name, text):
    """What a method returns is refused with the name and the reason."""
    ends = Ends([Worker(values)], [Worker({})])
    (reply,), _ = ends.describe()
    ((found, reason),) = reply.refused
    assert found == name
    assert text in reason


def selection(**changed):
    return Selection(**{"rename": lambda name: name, "dtype": None, "exclude": (), **changed})


def described(name, dtype="float32", shape=(4,), library="numpy"):
    return (name, library, dtype, 4, shape, (0,) * len(shape), shape)


def test_ranks_that_disagree_are_refused():
    """One tensor has one dtype and one global shape; two names do not become one; all are of one library."""
    with pytest.raises(LayoutMismatchError, match="the ranks of the source differ in its dtype or global shape: make"):
        read_side("source", [[described("a")], [described("a", "float64")]], selection(), renamed=True)
    with pytest.raises(LayoutMismatchError, match="two tensors of the source have this name"):
        read_side("source", [[described("a"), described("b")]], selection(rename=lambda name: "x"), renamed=True)
    with pytest.raises(LayoutMismatchError, match="must be of one library"):
        read_side("target", [[described("a"), described("b", library="torch")]], selection(), renamed=False)


def test_unknown_name_is_refused():
    """A name that is to be renamed must be one of the source's; the error has those that are near."""
    names = make_selection({"layers.0.weight": "w", "bias": "b"}, None, ())
    with pytest.raises(LayoutMismatchError, match=r"it has, for example, 'layer\.0\.weight'") as caught:
        read_side("source", [[described("layer.0.weight")], [described("bias")]], names, renamed=True)
    assert [(one.name, one.target) for one in caught.value.mismatches] == [("layers.0.weight", "w")]
    read_side("target", [[described("w"), described("b")]], names, renamed=False)


def test_dtypes_that_differ_are_refused():
    """Different dtypes need `dtype=`, which is for floating-point tensors."""
    held = read_side("source", [[described("a"), described("b", "int32")]], selection(), renamed=True)
    wanted = read_side("target", [[described("a", "bfloat16"), described("b", "int64")]], selection(), renamed=False)
    wrong = check_dtypes(held, wanted, selection())
    assert set(wrong) == {"a", "b"}
    assert "all floating-point tensors travel in it" in wrong["a"].reason
    assert set(check_dtypes(held, wanted, selection(dtype="bfloat16"))) == {"b"}


@pytest.mark.parametrize("kind", ["read-only", "broadcast", "overlapping"])
def test_targets_that_cannot_be_written(kind):
    """A target array that is read-only, or whose elements overlap, is refused by name before anything is decided."""
    values = np.zeros(8)
    values.flags.writeable = kind != "read-only"
    value = {
        "read-only": values,
        "broadcast": np.broadcast_to(np.zeros(1), (8,)),
        "overlapping": np.lib.stride_tricks.as_strided(values, (3, 4), (16, 8)),
    }[kind]
    refused = Ends([Worker({"a": np.ones(value.shape)})], [Worker({"a": value})]).refuse()
    assert [name for name, _ in refused] == ["a"]


@pytest.mark.parametrize("kind", ["copies", "some copies"])
def test_targets_that_return_copies(kind):
    """A target method that returns copies is refused by name: the new values would be lost with them."""

    class Copying(Worker):
        def weights(self):
            copied = self.tensors if kind == "copies" else ("a",)
            return {name: value.copy() if name in copied else value for name, value in self.tensors.items()}

    names = ["a", "b"] if kind == "copies" else ["a"]
    for _ in range(2):
        tensors = {name: np.zeros(4) for name in "ab"}
        refused = Ends([Worker({name: np.ones(4) for name in "ab"})], [Copying(tensors)]).refuse()
        assert [name for name, _ in refused] == names
        assert "copy" in refused[0][1]


def test_target_that_returns_copies_after_a_wake_up():
    """Copies that the target returns at the commit are refused too, and nothing is written."""

    class Copying(Worker):
        asleep = True

        def wake_up(self):
            self.asleep = False

        def weights(self):
            return self.tensors if self.asleep else {name: value.copy() for name, value in self.tensors.items()}

    ends = Ends([Worker({"a": np.ones(4)})], [Copying({"a": np.zeros(4)})])
    ends.plan()
    ends.fetch(ends.stage(), 1)
    (reply,) = ends.commit(1, before="wake_up")
    assert "returns a copy" in reply.error
    assert not reply.inconsistent


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (np.s_[:], np.s_[:2]),  # a fused tensor and a part of it
        (np.s_[:], np.s_[:]),  # tied tensors
        (np.s_[:2], np.s_[1:3]),
        (np.s_[:, :3], np.s_[:, 2:]),
        (np.s_[::2], np.s_[2:]),
        (np.s_[::-1], np.s_[3]),
    ],
)
def test_targets_that_overlap(first, second):
    """Two target tensors that share some elements are refused by name: the last one would win."""
    fused = np.zeros((4, 6))
    values = {"a": fused[first], "b": fused[second]}
    source = Worker({name: np.ones(value.shape) for name, value in values.items()})
    ((name, why),) = Ends([source], [Worker(values)]).refuse()
    assert f"shares some of its memory with {'b' if name == 'a' else 'a'!r}" in why
    assert not fused.any()
    Ends([source], [Worker(values)], exclude=("a",)).send(1)


def test_targets_that_only_interleave():
    """Parts of one tensor that share no element are written, although their memory interleaves."""
    fused = np.zeros((4, 6))
    values = {"a": fused[::2, :3], "b": fused[:, 3:], "c": fused[1::2, :3].T}
    sources = Worker(
        {name: np.full(value.shape, float(number)) for number, (name, value) in enumerate(values.items(), 1)}
    )
    Ends([sources], [Worker(values)]).send(1)
    assert fused.tolist() == [[1.0] * 3 + [2.0] * 3, [3.0] * 3 + [2.0] * 3] * 2


def test_names_with_brackets():
    """A name is excluded as it is, also one that is another pattern."""
    selection = Selection(str, None, ("layers[0].w", "head[12]"))
    assert [one for one in ("layers[0].w", "layers0.w", "head1", "head12") if selection.excludes(one)] == [
        "layers[0].w",
        "layers0.w",
        "head1",
    ]
