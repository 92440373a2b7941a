# SPDX-License-Identifier: Apache-2.0
"""Tests of calls of several groups without Ray: which worker gets what, and that all parts are sent or none."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_sharding import NamedSharding
from fairlead_workergroup import CallTimeoutError, PerWorker, Shard, WorkerFailure, WorkerFailureError, join
from fairlead_workergroup.exceptions import name_group

from ..calling import Acting
from ..local import Group, no_ray  # noqa: F401  a fixture of all tests


class Worker:
    """A worker that returns what it gets, and notes it."""

    def __init__(self):
        self.log = []

    def step(self, *values):
        self.log.append(values)
        return [*values]

    def take_log(self):
        log, self.log = self.log, []
        return log


@pytest.fixture(scope="module")
def find() -> Iterator[Callable[..., Group]]:
    """Return a function that returns the group of a name and axes, which starts once."""
    groups = {}
    with contextlib.ExitStack() as stack:

        def find_group(name, **shape):
            key = (name, *shape.items())
            if key not in groups:
                groups[key] = stack.enter_context(Group(type(name, (Worker,), {}), **shape))
            return groups[key]

        yield find_group


shapes = st.dictionaries(st.sampled_from(["dp", "tp"]), st.integers(1, 3), min_size=1, max_size=2)


@given(drawn=st.lists(shapes, min_size=1, max_size=4), only_first=st.booleans())
def test_each_worker_gets_its_own_value(find, drawn, only_first):
    """`PerWorker` has a value for each called worker, part by part and by rank; a plain value is the same for all."""
    both = join(*(find("abcd"[at], **shape) for at, shape in enumerate(drawn)))
    common = [axis for axis in ("dp", "tp") if all(axis in shape for shape in drawn)]
    first = common[:1] if only_first else []
    counts = []
    for shape in drawn:
        size = NamedSharding.from_shape(**shape).size
        counts.append(size // shape[first[0]] if first else size)
    call = both.call("step", PerWorker(list(range(sum(counts)))), 7, first_along=first)
    assert call.result() == [[at, 7] for at in range(sum(counts))]
    ranks = [[outcome.rank for outcome in part.outcomes()] for part in call.calls]
    assert ([len(part) for part in ranks], ranks) == (counts, [sorted(part) for part in ranks])
    with pytest.raises(ValueError, match=f"{sum(counts)} workers are called"):
        both.call("step", PerWorker(list(range(sum(counts) + 1))), first_along=first)


def test_pieces(find):
    """Each part splits the values of a `Shard` along its own axes, which need one size."""
    a, b = find("a", dp=2, tp=2), find("b", dp=2)
    assert join(a, b).call("step", Shard(["x", "y"], "dp")).result() == [["x"], ["x"], ["y"], ["y"], ["x"], ["y"]]
    with pytest.raises(ValueError, match=r"sizes \[2, 3\] along 'dp'"):
        join(a, find("b", dp=3)).call("step", Shard(["x", "y"], "dp"))


def test_one_deadline(find):
    """Without a timeout, the shortest timeout of the groups holds for all parts."""
    groups = [find(name, dp=2) for name in ("first", "second", "third")]
    for group, timeout in zip(groups, [None, 5.0, 9.0], strict=True):
        group._sender.call_timeout_s = timeout

    def find_deadlines(**options):
        return {part._execution.order.deadline for part in join(*groups).call("step", **options).calls}

    (deadline,) = find_deadlines()
    assert 4.0 < deadline.left() <= 5.0
    (deadline,) = find_deadlines(timeout=7.0)
    assert deadline.left() > 6.0


def test_all_or_none(find):
    """Nothing is sent while a group has lost a worker or its gate is closed, and the error names the group."""
    a, b, lossy = find("a", dp=2), find("b", dp=2), find("lossy", dp=2)
    for group in (a, b):
        group.call("take_log").result()
    with pytest.raises(WorkerFailureError, match=r"rank 1 .*of 'lossy'.*: killed"):
        join(a, lossy).call("step", PerWorker([1, 1, Acting(lambda: lossy.lose(1)), 1]))  # lost while that is stored
    with pytest.raises(WorkerFailureError, match=r"rank 1 .*of 'lossy'.*: killed"):
        join(a, lossy).call("step", 1)
    gate = b._sender.membership.gate
    gate.close()
    with pytest.raises(CallTimeoutError) as late:
        join(a, b).call("step", 2, timeout=0.1)
    assert late.value.__notes__ == ["in group 'b'"]
    threading.Timer(0.1, gate.open).start()
    assert join(a, b).call("step", 3, timeout=30.0).result() == [[3]] * 4
    assert join(a, b).call("take_log").result() == [[(3,)]] * 4
    # Two parts of one group pass its gate once.
    views = join(*(a.at(dp=at) for at in range(2)))
    assert views.call("step", 4).result() == [[4]] * 2


def test_an_error_about_workers_of_another_group():
    """An error that a worker has raised itself keeps the names in it, and gets a note only."""
    error = WorkerFailureError((WorkerFailure(3, "killed"),))
    error.__cause__ = RuntimeError()
    error.__cause__.cause = error
    for _ in range(2):
        name_group(error, "a")
    assert (error.failures[0].group, error.__notes__) == ("", ["in group 'a'"])
