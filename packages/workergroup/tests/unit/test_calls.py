# SPDX-License-Identifier: Apache-2.0
"""What calls plan, checked against a model of every worker on any layout, and what `map` does for each item."""

import inspect
import itertools
import random
import threading
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from fairlead_sharding import NamedSharding
from fairlead_workergroup import PerWorker, Shard
from fairlead_workergroup._calls import map as map_module
from fairlead_workergroup._calls.execution import SendState
from fairlead_workergroup._calls.map import MapOptions, _Balancer, _Item, map_items
from fairlead_workergroup._calls.plan import Mesh, make_columns, plan_call
from fairlead_workergroup._start.worker_class import Method
from fairlead_workergroup._transport.futures import ON_THREAD, block
from fairlead_workergroup._world import Deadline
from fairlead_workergroup.exceptions import CallTimeoutError, WorkerFailureError

AXES = ("pp", "dp", "tp")


@st.composite
def meshes(draw):
    """Draw a mesh of one to three axes with its ranks in any order, or a view of one."""
    names = draw(st.permutations(AXES))[: draw(st.integers(1, 3))]
    shape = draw(st.lists(st.integers(1, 4), min_size=len(names), max_size=len(names)))
    ranks = draw(st.permutations(range(int(np.prod(shape)))))
    mesh = Mesh(NamedSharding(np.array(ranks).reshape(shape), names))
    coords = {}
    for name, size in zip(names, shape, strict=True):
        kind = draw(st.sampled_from(["all", "all", "int", "slice"]))
        if kind == "int":
            coords[name] = draw(st.integers(-size, size - 1))
        elif kind == "slice":
            start = draw(st.integers(0, size - 1))
            coords[name] = slice(start, draw(st.integers(start + 1, size)))
    return mesh.at(coords), mesh, coords


def positions(mesh):
    """Return the rank and the coordinates of every worker, without a plan."""
    if mesh.single:
        return [(mesh.ranks[0], {})]
    layout = mesh.sharding.layout
    return [
        (int(layout[at]), dict(zip(mesh.names, at, strict=True))) for at in itertools.product(*map(range, layout.shape))
    ]


@given(meshes())
def test_views_select_as_numpy(drawn):
    """A view, or a view of a view, has the ranks that numpy selects from the layout."""
    view, mesh, coords = drawn
    index = tuple(coords.get(name, slice(None)) for name in mesh.names)
    assert view.ranks == sorted(np.asarray(mesh.sharding.layout[index]).ravel().tolist())
    assert view.names == tuple(name for name in mesh.names if not isinstance(coords.get(name), int))
    step = mesh
    for name, at in coords.items():
        step = step.at({name: at})
    assert (step.ranks, step.names) == (view.ranks, view.names)


@given(meshes(), st.data())
def test_recipients(drawn, data):
    """Workers at 0 along first_along are called; one returns a result for each collected coordinate, row-major."""
    view, _, _ = drawn
    first = data.draw(st.lists(st.sampled_from(view.names), unique=True)) if view.names else []
    others = [name for name in view.names if name not in first]
    collect = data.draw(st.none() | st.permutations(others).map(lambda names: names[: len(names) // 2 + 1]))
    plan = plan_call(view, collect=collect, first_along=first)

    called = sorted(rank for rank, coords in positions(view) if all(coords[axis] == 0 for axis in first))
    assert plan.called == called
    if collect is None:
        assert plan.returned == called
    else:
        rank_at = {tuple(coords[name] for name in view.names): rank for rank, coords in positions(view)}
        sizes = {name: view.sharding.get_axis_size(name) for name in view.names}
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
    if not view.names:
        return
    axes = data.draw(st.permutations(view.names))[: data.draw(st.integers(1, len(view.names)))]
    first = data.draw(st.lists(st.sampled_from(view.names), unique=True).map(lambda a: [x for x in a if x not in axes]))
    plan = plan_call(view, first_along=first)
    coords_of = dict(positions(view))
    pieces = np.empty([view.sharding.get_axis_size(axis) for axis in axes], dtype=object)
    for at in np.ndindex(pieces.shape):
        pieces[at] = at
    got = plan.column(Shard(pieces.tolist(), *axes)).expand(len(plan.called))
    assert got == [tuple(coords_of[rank][axis] for axis in axes) for rank in plan.called]
    own = plan.column(PerWorker([f"of {rank}" for rank in plan.called])).expand(len(plan.called))
    assert own == [f"of {rank}" for rank in plan.called]
    assert plan.column("all").expand(len(plan.called)) == ["all"] * len(plan.called)


MESH = Mesh(NamedSharding.from_shape(dp=2, tp=4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collect": "pp"}, "Invalid axis name: 'pp'"),
        ({"first_along": ["pp"]}, "Invalid axis name: 'pp'"),
        ({"collect": ("dp", "dp")}, "an axis is named twice"),
        ({"collect": ("dp",), "first_along": ("dp",)}, r"axes \['dp'\] cannot be collected"),
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
        (lambda: Shard([1] * 4, "tp"), ValueError, r"cannot be split along \['tp'\]"),
        (lambda: Shard([1, 2]), ValueError, "Shard needs the axes"),
        (lambda: PerWorker([1, 2, 3]), ValueError, "has 3 values, but 6 workers are called"),
        (lambda: PerWorker("ab"), TypeError, "must be a list with a value per worker called"),
        (lambda: PerWorker({0: 1, 1: 2}), TypeError, "must be a list with a value per worker called"),
    ],
)
def test_bad_values(value, error, message):
    """Too few values, too many values, and values that are not a sequence are refused."""
    mesh = Mesh(NamedSharding.from_shape(dp=2, tp=4, pp=3))
    with pytest.raises(error, match=message):
        plan_call(mesh, first_along="tp").column(value())


def test_errors_of_values_name_the_argument():
    """The error about a value names the method, the argument, the axis, and what to give instead."""
    method = Method("step", "plain", inspect.signature(lambda batch, *, rate: None))
    plan = plan_call(Mesh(NamedSharding.from_shape(dp=2, tp=4)))
    with pytest.raises(ValueError, match=r"argument 'batch' of 'step': .* expected 2, found 3") as caught:
        make_columns(method, [Shard([1, 2, 3], "dp")], {}, plan.column)
    assert "Shard(values, 'dp') takes one piece for each of the 2 coordinates along 'dp'" in str(caught.value)
    assert "numpy.array_split(values, 2)" in str(caught.value)
    with pytest.raises(ValueError, match=r"argument 'rate' of 'step': .*one level for each axis: 2 for 'dp' of 4 for"):
        make_columns(method, [1], {"rate": Shard([[1], [2]], "dp", "tp")}, plan.column)
    with pytest.raises(ValueError, match="argument 'rate' of 'step': it has 3 values, but 8 workers are called"):
        make_columns(method, [1], {"rate": PerWorker([1, 2, 3])}, plan.column)


def test_a_view_of_one_worker_has_no_axes():
    """An axis of a single worker is refused with its own message; a coordinate outside names the axis and its size."""
    one = MESH.at({"dp": 1, "tp": -1})
    assert (one.ranks, one.names) == ([7], ())
    with pytest.raises(ValueError, match="This is a view of one worker"):
        one.at({"dp": 0})
    with pytest.raises(IndexError, match="outside axis 'tp' of size 4"):
        MESH.at({"tp": 4})
    with pytest.raises(ValueError, match="selects nothing of axis 'dp' of size 2"):
        MESH.at({"dp": slice(2, 2)})
    assert plan_call(one, collect=()).returned == [7]


def test_plans_are_cached():
    """The same question returns the cached plan."""
    again = Mesh(NamedSharding.from_shape(dp=2, tp=4))
    assert plan_call(MESH, collect="dp") is plan_call(again, collect=["dp"])


WORKERS, ITEMS = 500, 2_000


# How often anything has looked whether an answer is there.
looked = Counter()


class Reference:
    """A reference to an answer."""

    def __init__(self, value):
        self.value = value

    def future(self):
        looked[self.value] += 1
        future = Future()
        future.set_result(self.value)
        return future


class Call:
    """A call of one worker that has been answered."""

    sending, send_state = None, SendState.SENT

    def __init__(self, value):
        self.futures = [Reference(value)]
        self.order = SimpleNamespace(deadline=Deadline())

    def shape(self, values):
        return values[0]

    async def results(self, on):
        return self.futures[0].value

    def withdraw(self, force):
        return True


@pytest.fixture
def sender(monkeypatch):
    """A sender of a group whose workers return their items."""
    looked.clear()
    # Without Ray: a wait by Ray is given references, each of which it looks at.
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (looked.update(ref.value for ref in refs), (refs, []))[1])
    monkeypatch.setattr(
        map_module, "dispatch", lambda sender, owner, method, to, columns, *_, **__: Call(columns[0].values[0])
    )
    method = SimpleNamespace(name="work", result="value", function=None, check=lambda *_: None)
    monkeypatch.setattr(map_module, "replace", lambda called, **_: called)
    now = SimpleNamespace(has=lambda ranks: True)
    roster = SimpleNamespace(check_connected=lambda: None, now=now, connected=True)
    worker_class = SimpleNamespace(method=lambda _: method)
    described = SimpleNamespace(worker_class=worker_class)
    return SimpleNamespace(described=described, check_retries=lambda _: None, roster=roster)


@pytest.mark.parametrize("strategy", ["round_robin", "least_loaded"])
def test_each_answer_is_looked_at_once(sender, strategy):
    """The cost of an item does not grow with the number of items that are under way: a wait is given each once."""
    options = MapOptions(strategy=strategy, move_items=False)
    results = map_items(sender, None, range(WORKERS), "work", range(ITEMS), options)
    assert list(results) == list(range(ITEMS))
    assert looked == dict.fromkeys(range(ITEMS), 1)


class LateCall(Call):
    """A call whose deadline has passed; all of them are answered but the one that hangs."""

    checks = 0

    def __init__(self, value, hangs):
        super().__init__(value)
        self.order = SimpleNamespace(deadline=Deadline.after(0.0))
        self.hangs = hangs
        if hangs:
            self.futures = [SimpleNamespace(future=Future)]

    def check_late(self, deadline):
        LateCall.checks += 1
        assert LateCall.checks < 100, "the map looks at the same call for ever"
        if self.hangs:
            raise CallTimeoutError("work", waited_s=0.0, called=1, late=())
        return Deadline()


@pytest.fixture
def late_calls(monkeypatch):
    """Every item is late, and item 0 never answers."""
    monkeypatch.setattr(LateCall, "checks", 0)
    monkeypatch.setattr(
        map_module,
        "dispatch",
        lambda sender, owner, method, to, columns, *_, **__: LateCall(value := columns[0].values[0], value == 0),
    )


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("strategy", ["round_robin", "least_loaded"])
def test_answers_that_arrive_as_an_item_times_out(sender, late_calls, strategy, ordered):
    """They count: the map goes on with the items after the one that hangs."""
    options = MapOptions(strategy=strategy, move_items=False, ordered=ordered, return_exceptions=True)
    results = list(map_items(sender, None, range(3), "work", range(20), options))
    (late,) = [result for result in results if isinstance(result, CallTimeoutError)]
    assert late.__notes__ == ["item 0 of map('work')"]
    values = [result for result in results if result is not late]
    assert (values if ordered else sorted(values)) == list(range(1, 20))
    assert not ordered or results[0] is late
    assert LateCall.checks == 1


def test_a_value_that_is_on_its_way(sender, monkeypatch):
    """A worker that has finished is not late; the wait for its value does not keep a processor busy."""
    value = Future()

    class Transfer(LateCall):
        """A call whose value takes a while to this process."""

        def check_late(self, deadline):
            if not self.checks:
                threading.Timer(0.2, value.set_result, ["value"]).start()
            return super().check_late(deadline)

    call = Transfer(0, hangs=False)
    call.futures = [SimpleNamespace(future=lambda: value)]
    monkeypatch.setattr(LateCall, "checks", 0)
    monkeypatch.setattr(map_module, "dispatch", lambda *_, **__: call)
    options = MapOptions(strategy="round_robin", move_items=False)
    assert list(map_items(sender, None, [0], "work", [0], options)) == ["value"]


def test_the_item_that_a_loss_names(sender, monkeypatch):
    """It is the first that the lost worker had, also if the loss of a later one arrives first."""

    class Lost(Call):
        def __init__(self, value):
            super().__init__(value)
            if value in (1, 5):  # both of the same worker; the first is still under way
                answer = Future()
                self.futures = [SimpleNamespace(future=lambda: answer)]
                if value == 5:
                    answer.set_exception(RuntimeError("the worker is dead"))

        async def results(self, on):
            raise WorkerFailureError(())

    monkeypatch.setattr(
        map_module, "dispatch", lambda sender, owner, method, to, columns, *_, **__: Lost(columns[0].values[0])
    )
    sender.cancel = lambda *_, **__: None
    with pytest.raises(WorkerFailureError) as caught:
        list(map_items(sender, None, range(4), "work", range(12), MapOptions(strategy="round_robin", move_items=False)))
    assert caught.value.__notes__ == ["item 1 of map('work'); workers lost with it: 1"]


def test_the_least_loaded_worker(sender):
    """It is the first of those with the fewest items, whichever items have finished and workers were lost."""
    rng = random.Random(0)
    options = MapOptions(strategy="least_loaded", move_items=True, max_in_flight=100)
    balancer, expected = (
        _Balancer(sender, None, range(50), sender.described.worker_class.method("work"), options),
        dict.fromkeys(range(50), 0),
    )
    for turn in range(2_000):
        least = min(expected, key=expected.__getitem__)
        assert balancer._choose() == least
        balancer._send(_Item(turn, turn, least), may_wait=True)
        expected[least] += 1
        for call in rng.sample(list(balancer._sent), rng.randrange(3) if turn > 50 else 0):
            rank = balancer._sent[call].rank
            value = call.futures[0].value
            assert block(balancer.settle(call, call.futures[0].future(), ON_THREAD)) == [(value, value)]
            if rank in expected:
                expected[rank] -= 1
        if turn % 50 == 0 and len(expected) > 20:
            lost = rng.choice(list(expected))
            assert balancer._handle_loss(_Item(turn, turn, lost), WorkerFailureError(())) == []
            del expected[lost]
