# SPDX-License-Identifier: Apache-2.0
"""Tests of calls of several groups without Ray: which worker gets what, and that all parts are sent or none."""

import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_sharding import NamedSharding
from fairlead_workergroup import CallTimeoutError, PerWorker, Shard, WorkerFailure, WorkerFailureError
from fairlead_workergroup._calls.joint import _prepare, _send_now
from fairlead_workergroup._calls.map import MapOptions
from fairlead_workergroup._calls.plan import CallOptions, Mesh
from fairlead_workergroup._calls.sender import Admitted, Sent
from fairlead_workergroup._calls.view import Target
from fairlead_workergroup._membership.roster import Gate
from fairlead_workergroup._start.worker_class import Described, Method, WorkerClass
from fairlead_workergroup.exceptions import name_group


class Sender:
    """The sender of a group whose workers only note what they get."""

    is_owner, transport, put, observed = True, None, None, SimpleNamespace(explain=lambda error: None)

    def __init__(self, name, call_timeout_s=None, obstacle=None):
        self.roster = SimpleNamespace(name_prefix=name)
        self.described = Described(WorkerClass("", "Worker", {"step": Method("step", "plain", None)}))
        self.membership = SimpleNamespace(gate=Gate())
        self.call_timeout_s, self.obstacle, self.sent = call_timeout_s, obstacle, []

    def prepare(self, order):
        return order

    def admit(self, order, *, early=False):
        return self.obstacle or Admitted(None, ())

    def submit(self, order, admitted):
        self.sent.append(order)
        return Sent([f"{self.roster.name_prefix}{rank}" for rank in order.ranks], 0, 0)

    def overcome(self, order, obstacle):
        if obstacle is None:
            raise CallTimeoutError(order.method.name, 0.0, 1, ())
        raise WorkerFailureError(tuple(obstacle))


def make_target(sender, sharding):
    return None, Target(sender, Mesh(sharding), sharding, MapOptions("round_robin", move_items=False))


def prepare(targets, *args, **options):
    return _prepare(targets, "step", CallOptions(**options), args, {})


def received(parts):
    """Return the arguments that the called workers of each part get, by rank."""
    return [
        dict(zip(part.order.ranks, [request.args for request in part.order.requests], strict=True)) for part in parts
    ]


shapes = st.dictionaries(st.sampled_from(["dp", "tp"]), st.integers(1, 3), min_size=1, max_size=2)


@given(st.lists(shapes, min_size=1, max_size=4), st.booleans())
def test_each_worker_gets_its_own_value(drawn, only_first):
    """`PerWorker` has a value for each called worker, part by part and by rank; a plain value is the same for all."""
    targets = [make_target(Sender(str(at)), NamedSharding.from_shape(**shape)) for at, shape in enumerate(drawn)]
    common = [axis for axis in ("dp", "tp") if all(axis in shape for shape in drawn)]
    first = common[:1] if only_first else []
    counts = []
    for shape in drawn:
        size = NamedSharding.from_shape(**shape).size
        counts.append(size // shape[first[0]] if first else size)
    parts = prepare(targets, PerWorker(list(range(sum(counts)))), 7, first_along=first)
    values = [args for part in received(parts) for _, args in sorted(part.items())]
    assert values == [[at, 7] for at in range(sum(counts))]
    assert [len(part.order.ranks) for part in parts] == counts
    with pytest.raises(ValueError, match=f"{sum(counts)} workers are called"):
        prepare(targets, PerWorker(list(range(sum(counts) + 1))), first_along=first)


def test_pieces():
    """Each part splits the values of a `Shard` along its own axes, which need one size."""
    a, b = Sender("a"), Sender("b")
    same = [make_target(a, NamedSharding.from_shape(dp=2, tp=2)), make_target(b, NamedSharding.from_shape(dp=2))]
    assert received(prepare(same, Shard(["x", "y"], "dp"))) == [
        {0: ["x"], 1: ["x"], 2: ["y"], 3: ["y"]},
        {0: ["x"], 1: ["y"]},
    ]
    other = [make_target(a, NamedSharding.from_shape(dp=2)), make_target(b, NamedSharding.from_shape(dp=4))]
    with pytest.raises(ValueError, match=r"sizes \[2, 4\] along 'dp'"):
        prepare(other, Shard(["x", "y"], "dp"))


def test_one_deadline():
    """Without a timeout, the shortest timeout of the groups holds for all parts."""
    sharding = NamedSharding.from_shape(dp=2)
    targets = [make_target(Sender(name, timeout), sharding) for name, timeout in [("a", None), ("b", 5.0), ("c", 9.0)]]
    assert len({part.order.deadline for part in prepare(targets)}) == 1
    assert 4.0 < prepare(targets)[0].order.deadline.left() <= 5.0
    assert prepare(targets, timeout=7.0)[0].order.deadline.left() > 6.0


def test_all_or_none():
    """Nothing is sent while a group has lost a worker or its gate is closed, and the error names the group."""
    sharding = NamedSharding.from_shape(dp=2)
    a, b = Sender("a"), Sender("b")
    targets = [make_target(a, sharding), make_target(b, sharding)]
    b.obstacle = [WorkerFailure(1, "killed")]
    with pytest.raises(WorkerFailureError, match="rank 1 of 'b': killed"):
        _send_now(prepare(targets))
    b.obstacle = None
    b.membership.gate.close()
    with pytest.raises(CallTimeoutError) as late:
        _send_now(prepare(targets, timeout=0.1))
    assert late.value.__notes__ == ["in group 'b'"]
    assert (a.sent, b.sent) == ([], [])
    threading.Timer(0.1, b.membership.gate.open).start()
    assert [one.futures for one in _send_now(prepare(targets, timeout=30.0))] == [["a0", "a1"], ["b0", "b1"]]
    # Two parts of one group pass its gate once.
    views = [(None, targets[0][1].at({"dp": at})) for at in range(2)]
    assert [one.futures for one in _send_now(prepare(views))] == [["a0"], ["a1"]]


def test_an_error_about_workers_of_another_group():
    """An error that a worker has raised itself keeps the names in it, and gets a note only."""
    error = WorkerFailureError((WorkerFailure(3, "killed"),))
    error.__cause__ = RuntimeError()
    error.__cause__.cause = error
    for _ in range(2):
        name_group(error, "a")
    assert (error.failures[0].group, error.__notes__) == ("", ["in group 'a'"])
