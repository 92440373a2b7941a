# SPDX-License-Identifier: Apache-2.0
"""What calls plan, checked against a model of every worker on any layout."""

import inspect
import itertools
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle

from fairlead_sharding import NamedSharding
from fairlead_workergroup import PerWorker, Shard
from fairlead_workergroup import _arguments as arguments
from fairlead_workergroup._arguments import Arguments
from fairlead_workergroup._calls.plan import CallOptions, make_columns, make_plan, select, sorted_ranks
from fairlead_workergroup._start.worker_class import Method

AXES = ("pp", "dp", "tp")


def plan_call(mesh, **options):
    """Return the plan of a call with these options."""
    return make_plan(mesh, CallOptions(**options))


@st.composite
def meshes(draw):
    """Draw a mesh of one to three axes with its ranks in any order, or a view of one."""
    names = draw(st.permutations(AXES))[: draw(st.integers(1, 3))]
    shape = draw(st.lists(st.integers(1, 4), min_size=len(names), max_size=len(names)))
    ranks = draw(st.permutations(range(int(np.prod(shape)))))
    mesh = NamedSharding(np.array(ranks).reshape(shape), names)
    coords = {}
    for name, size in zip(names, shape, strict=True):
        kind = draw(st.sampled_from(["all", "all", "int", "slice"]))
        if kind == "int":
            coords[name] = draw(st.integers(-size, size - 1))
        elif kind == "slice":
            start = draw(st.integers(0, size - 1))
            coords[name] = slice(start, draw(st.integers(start + 1, size)))
    return select(mesh, coords), mesh, coords


def positions(mesh):
    """Return the rank and the coordinates of every worker, without a plan."""
    layout = mesh.layout
    return [
        (int(layout[at]), dict(zip(mesh.names, at, strict=True))) for at in itertools.product(*map(range, layout.shape))
    ]


@given(meshes())
def test_views_select_as_numpy(drawn):
    """A view, or a view of a view, has the ranks that numpy selects from the layout."""
    view, mesh, coords = drawn
    index = tuple(coords.get(name, slice(None)) for name in mesh.names)
    assert sorted_ranks(view) == sorted(np.asarray(mesh.layout[index]).ravel().tolist())
    left = [name for name in mesh.names if not isinstance(coords.get(name), int)]
    assert list(view.names) == (left or ["worker"])
    step = mesh
    for name, at in coords.items():
        step = select(step, {name: at})
    assert step == view


@given(meshes(), st.data())
def test_recipients(drawn, data):
    """All workers of a view are called; one returns a result for each collected coordinate, row-major."""
    view, _, _ = drawn
    collect = data.draw(st.none() | st.permutations(view.names).map(lambda names: names[: len(names) // 2 + 1]))
    plan = plan_call(view, collect=collect)

    called = sorted(rank for rank, _ in positions(view))
    assert plan.called == called
    if collect is None:
        assert plan.returned == called
    else:
        rank_at = {tuple(coords[name] for name in view.names): rank for rank, coords in positions(view)}
        sizes = {name: view.get_axis_size(name) for name in view.names}
        wanted = []
        for at in itertools.product(*(range(sizes[axis]) for axis in collect)):
            coords = {**dict.fromkeys(view.names, 0), **dict(zip(collect, at, strict=True))}
            wanted.append(rank_at[tuple(coords[name] for name in view.names)])
        assert plan.returned == wanted
    answers = [True] * len(called) if plan.answers is None else plan.answers
    assert [rank for rank, is_answer in zip(called, answers, strict=True) if is_answer] == sorted(plan.returned)


@given(meshes(), st.data())
def test_pieces(drawn, data):
    """The worker at coordinate c along the axes gets piece c, whatever its rank; PerWorker goes by ascending rank."""
    view, _, _ = drawn
    axes = data.draw(st.permutations(view.names))[: data.draw(st.integers(1, len(view.names)))]
    plan = plan_call(view)
    coords_of = dict(positions(view))
    pieces = np.empty([view.get_axis_size(axis) for axis in axes], dtype=object)
    for at in np.ndindex(pieces.shape):
        pieces[at] = at
    got = plan.column(Shard(pieces.tolist(), *axes)).expand(len(plan.called))
    assert got == [tuple(coords_of[rank][axis] for axis in axes) for rank in plan.called]
    own = plan.column(PerWorker([f"of {rank}" for rank in plan.called])).expand(len(plan.called))
    assert own == [f"of {rank}" for rank in plan.called]
    assert plan.column("all").expand(len(plan.called)) == ["all"] * len(plan.called)


MESH = NamedSharding.from_shape(dp=2, tp=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collect": "pp"}, "Invalid axis name: 'pp'"),
        ({"collect": ("dp", "dp")}, "an axis is named twice"),
        ({"collect": (), "discard": True}, "discard=True returns no results"),
    ],
)
def test_bad_options(options, message):
    """Contradicting axes are refused and named."""
    with pytest.raises(ValueError, match=message):
        plan_call(MESH, **options)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (lambda: Shard([1, 2, 3], "dp"), ValueError, "expected 2, found 3"),
        (lambda: Shard([1], "dp"), ValueError, "expected 2, found 1"),
        (lambda: Shard([[1] * 3, [1] * 2], "dp", "pp"), ValueError, r"depth 1, axis 'pp' .*expected 3, found 2"),
        (lambda: Shard("ab", "dp"), TypeError, "Expected a sequence of 2 pieces"),
        (lambda: Shard([1, 2], "cp"), ValueError, "Invalid axis name: 'cp'"),
        (lambda: Shard([1] * 4, "tp"), ValueError, "Invalid axis name: 'tp'"),
        (lambda: Shard([1, 2]), ValueError, "Shard needs the axes"),
        (lambda: PerWorker([1, 2, 3]), ValueError, "has 3 values, but 6 workers are called"),
        (lambda: PerWorker("ab"), TypeError, "must be a list with a value per worker called"),
        (lambda: PerWorker({0: 1, 1: 2}), TypeError, "must be a list with a value per worker called"),
    ],
)
def test_bad_values(value, error, message):
    """Too few values, too many values, and values that are not a sequence are refused."""
    mesh = NamedSharding.from_shape(dp=2, tp=4, pp=3)
    with pytest.raises(error, match=message):
        plan_call(select(mesh, {"tp": 0})).column(value())


def test_errors_of_values_name_the_argument():
    """The error about a value names the method, the argument, the axis, and what to give instead."""
    method = Method("step", "plain", inspect.signature(lambda batch, *, rate=None: None))
    plan = plan_call(MESH)
    with pytest.raises(ValueError, match=r"argument 'batch' of 'step': .* expected 2, found 3") as caught:
        make_columns(method, [Shard([1, 2, 3], "dp")], {}, plan.column)
    assert "Shard(values, 'dp') takes one piece for each of the 2 coordinates along 'dp'" in str(caught.value)
    assert "numpy.array_split(values, 2)" in str(caught.value)
    with pytest.raises(ValueError, match=r"argument 'rate' of 'step': .*one level for each axis: 2 for 'dp' of 4 for"):
        make_columns(method, [1], {"rate": Shard([[1], [2]], "dp", "tp")}, plan.column)
    with pytest.raises(ValueError, match="argument 'rate' of 'step': it has 3 values, but 8 workers are called"):
        make_columns(method, [1], {"rate": PerWorker([1, 2, 3])}, plan.column)


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (threading.Lock(), "create it in the worker's `__init__`"),
        ([Shard([1, 2], "dp")], "whole argument of `call`: elsewhere, pass its values"),
    ],
)
def test_values_that_cannot_be_pickled(monkeypatch, value, remedy):
    """The refusal ends with the remedy (seam: Ray's object store)."""
    monkeypatch.setattr(arguments.ray, "put", cloudpickle.dumps)
    with pytest.raises(TypeError) as caught:
        Arguments().prepare(value)
    assert str(caught.value).endswith(remedy)


def test_coordinates():
    """A view of a single worker has the axis `worker`; a coordinate outside names the axis and its size."""
    one = select(MESH, {"dp": 1, "tp": -1})
    assert (sorted_ranks(one), list(one.names)) == ([7], ["worker"])
    with pytest.raises(ValueError, match="Invalid axis name: 'dp'"):
        select(one, {"dp": 0})
    with pytest.raises(ValueError, match=r"along \['dp', 'tp'\]: those of rank 0 are \{'dp': 0, 'tp': 0\}"):
        select(MESH, {"rank": 0})
    with pytest.raises(IndexError, match="outside axis 'tp' of size 4"):
        select(MESH, {"tp": 4})
    with pytest.raises(ValueError, match="selects nothing of axis 'dp' of size 2"):
        select(MESH, {"dp": slice(2, 2)})
    assert plan_call(one, collect=()).returned == [7]
