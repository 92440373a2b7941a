# SPDX-License-Identifier: Apache-2.0
"""Dispatch plans: which ranks are called, with which piece, and which return a result."""

import collections

import numpy as np
import pytest

from fairlead_sharding import DispatchPlan, NamedSharding

SHARDING = NamedSharding.from_shape(dp=2, pp=2, tp=2)


def facts(plan):
    return plan.called.tolist(), plan.piece.tolist(), plan.answers.tolist(), plan.returned.tolist()


def test_sharded_and_replicated():
    """All ranks are called and return a result; along the replicated axes the piece is the same."""
    plan = SHARDING.plan(in_sharded_axes=["dp"], replicate_on_axes=["pp", "tp"])

    assert isinstance(plan, DispatchPlan)
    assert facts(plan) == ([*range(8)], [0, 0, 0, 0, 1, 1, 1, 1], [True] * 8, [*range(8)])
    assert (plan.piece_shape, plan.n_pieces) == ((2,), 2)
    assert plan.called.dtype == plan.piece.dtype == plan.returned.dtype == np.int64
    assert plan.answers.dtype == np.bool_


def test_free_axes():
    """Along a free axis only coordinate 0 is called."""
    plan = SHARDING.plan(in_sharded_axes=["dp"], replicate_on_axes=["tp"])

    assert facts(plan) == ([0, 1, 4, 5], [0, 0, 1, 1], [True] * 4, [0, 1, 4, 5])


def test_dummy_calls():
    """Dummy calls go to the other coordinates along free axes, without a piece and a result."""
    plan = SHARDING.plan(["dp"], ["tp"], make_dummy_calls_to_free_axes=True)

    assert plan.called.tolist() == [*range(8)]
    assert plan.piece.tolist() == [0, 0, -1, -1, 1, 1, -1, -1]
    assert plan.answers.tolist() == [True, True, False, False, True, True, False, False]
    assert plan.returned.tolist() == [0, 1, 4, 5]


def test_replicated_output():
    """One called rank returns a result along the axes whose output is replicated, which may be any axes."""
    assert SHARDING.plan("dp", ["pp", "tp"], ["tp"]).returned.tolist() == [0, 2, 4, 6]
    assert SHARDING.plan("dp", ["pp", "tp"], ["pp", "tp"]).returned.tolist() == [0, 4]
    assert SHARDING.plan("dp", ["pp", "tp"], ["dp"]).returned.tolist() == [0, 1, 2, 3]
    assert SHARDING.plan("dp", [], ["tp"]).returned.tolist() == [0, 4]


def test_nested_axes_in_the_order_given():
    """The first of several sharded axes is the outer level of the pieces."""
    plan = SHARDING.plan(in_sharded_axes=["tp", "dp"])
    pieces = plan.pieces([["tp0dp0", "tp0dp1"], ["tp1dp0", "tp1dp1"]])

    received = dict(zip(plan.called.tolist(), (pieces[i] for i in plan.piece), strict=True))
    assert received == {0: "tp0dp0", 1: "tp1dp0", 4: "tp0dp1", 5: "tp1dp1"}


def test_nothing_sharded():
    """Without sharded axes the data is the one piece, whatever its type."""
    plan = SHARDING.plan(replicate_on_axes=["dp", "pp", "tp"])

    assert plan.piece.tolist() == [0] * 8
    assert (plan.piece_shape, plan.n_pieces) == ((), 1)
    for data in ("text", {"a": 1}, None, 3):
        assert plan.pieces(data) == [data]


def test_all_axes_free():
    """With every axis free, one worker does everything."""
    assert facts(SHARDING.plan()) == ([0], [0], [True], [0])


def test_ranks_ascend_whatever_the_layout():
    """The order of the ranks in the layout determines their pieces, not the order in the plan."""
    sharding = NamedSharding([[7, 3], [5, 100]], ["dp", "tp"])
    plan = sharding.plan("dp", replicate_on_axes="tp", output_is_replicated="tp")

    assert facts(plan) == ([3, 5, 7, 100], [0, 1, 0, 1], [False, True, True, False], [5, 7])


def test_sharded_and_replicated_axis():
    """An axis cannot be both."""
    with pytest.raises(ValueError, match=r"Axes cannot be both sharded and replicated: \['tp'\]"):
        SHARDING.plan(in_sharded_axes=["dp", "tp"], replicate_on_axes=["tp", "pp"])


def test_levels():
    """A level is anything with a length, indexed by position."""
    plan = NamedSharding.from_shape(dp=2, tp=2).plan(["dp", "tp"])

    class Batches:
        def __len__(self):
            return 2

        def __getitem__(self, i):
            return [(i, 0), (i, 1)]

    assert plan.pieces([[1, 2], (3, 4)]) == [1, 2, 3, 4]
    assert plan.pieces([range(2), collections.deque([3, 4])]) == [0, 1, 3, 4]
    assert plan.pieces(Batches()) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    rows = plan.pieces(np.arange(8).reshape(2, 2, 2))
    assert [row.tolist() for row in rows] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_pieces_are_passed_on_untouched():
    """Pieces below the levels of the plan are not inspected."""
    plan = NamedSharding.from_shape(dp=2).plan("dp")
    first, second = {"a": [1, 2, 3]}, object()

    assert plan.pieces([first, second])[0] is first
    assert plan.pieces((first, second))[1] is second


@pytest.mark.parametrize(
    ("nested", "message"),
    [
        ([[1, 2]], r"depth 0, axis 'dp' \(pieces\): expected 2, found 1"),
        ([[1, 2]] * 3, r"depth 0, axis 'dp' \(pieces\): expected 2, found 3"),
        ([], r"depth 0, axis 'dp' \(pieces\): expected 2, found 0"),
        ([[1, 2], [3]], r"depth 1, axis 'tp' \(pieces\[1\]\): expected 2, found 1"),
        ([[1, 2, 3], [4, 5]], r"depth 1, axis 'tp' \(pieces\[0\]\): expected 2, found 3"),
        (np.zeros((2, 3)), r"depth 1, axis 'tp' \(pieces\[0\]\): expected 2, found 3"),
    ],
)
def test_wrong_number_of_pieces(nested, message):
    """Too few and too many pieces are refused at any depth, never dropped silently."""
    plan = NamedSharding.from_shape(dp=2, tp=2).plan(["dp", "tp"])

    with pytest.raises(ValueError, match=f"Wrong number of pieces at {message}"):
        plan.pieces(nested)


def test_wrong_number_of_pieces_far_down():
    """The message names the indices of the wrong level."""
    plan = SHARDING.plan(["dp", "pp", "tp"])

    with pytest.raises(ValueError, match=r"depth 2, axis 'tp' \(pieces\[1\]\[0\]\): expected 2, found 4"):
        plan.pieces([[[1, 2], [3, 4]], [[5, 6, 7, 8], [9, 10]]])


@pytest.mark.parametrize(
    ("nested", "found"),
    [
        ("ab", "str"),
        (b"ab", "bytes"),
        ({0: 1, 1: 2}, "dict"),
        ({1, 2}, "set"),
        (7, "int"),
        (None, "NoneType"),
        (iter([1, 2]), "list_iterator"),
        (np.array(7), "ndarray"),
    ],
)
def test_not_a_sequence_of_pieces(nested, found):
    """Strings, bytes, mappings and sets are refused, although they have a length."""
    plan = NamedSharding.from_shape(dp=2, tp=2).plan(["dp", "tp"])

    message = rf"Expected a sequence of 2 pieces at depth {{}}, axis '{{}}' \(pieces{{}}\), found a {found}"
    with pytest.raises(TypeError, match=message.format(0, "dp", "")):
        plan.pieces(nested)
    with pytest.raises(TypeError, match=message.format(1, "tp", r"\[1\]")):
        plan.pieces([[1, 2], nested])


def test_explain():
    """Every called rank has a row."""
    sharding = NamedSharding([[3, 1], [2, 0]], ["dp", "tp"])

    assert sharding.plan("dp", "tp", "tp").explain().splitlines() == [
        "4 of 4 ranks called, 2 pieces along ['dp'], 2 answer",
        "rank  dp  tp  piece  answers",
        "   0   1   1      1       no",
        "   1   0   1      0       no",
        "   2   1   0      1      yes",
        "   3   0   0      0      yes",
    ]
    assert sharding.plan().explain().startswith("1 of 4 ranks called, 1 piece, 1 answer\n")


def test_explain_is_short():
    """A long table shows the first and the last ranks."""
    plan = NamedSharding.from_shape(dp=1000).plan("dp")
    lines = plan.explain(max_rows=5).splitlines()

    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "2", "...", "998", "999"]
    assert len(plan.explain().splitlines()) == 43


def test_repr():
    """The repr is short for any number of ranks."""
    plan = NamedSharding.from_shape(dp=1000, tp=8).plan("dp", "tp", "tp")

    assert repr(plan) == "<DispatchPlan: 8000 of 8000 ranks called, 1000 pieces along ['dp'], 1000 answer>"
