# SPDX-License-Identifier: Apache-2.0
"""Endpoints in this process: plans, proofs of membership, and what fails before tensors change."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from fairlead_transfer import LayoutMismatchError, LocalTensor, TransferError
from fairlead_transfer._endpoint import Endpoint, plan_endpoints
from fairlead_transfer._remote import end, segment

from ..engines import leave_nothing


def travel(value):
    """Return a value as another process gets it."""
    return pickle.loads(pickle.dumps(value))


@pytest.fixture(autouse=True)
def nothing_left():
    """Check that closed endpoints leave nothing."""
    with leave_nothing():
        yield


@pytest.fixture
def sides(nothing_left):
    """Return two sources with half of "w" each, two targets with other halves of it, and the arrays."""
    w, copies = np.arange(24.0).reshape(4, 6), [np.zeros((4, 3)), np.zeros((4, 3))]
    sources = [Endpoint({"w": LocalTensor(w[at : at + 2], (4, 6), (at, 0))}) for at in (0, 2)]
    targets = [Endpoint({"w": LocalTensor(one, (4, 6), (0, at))}) for one, at in zip(copies, (0, 3), strict=True)]
    yield sources, targets, w, copies
    for one in (*sources, *targets):
        one.close()


def plan_all(sources, targets):
    return plan_endpoints([travel(one.describe()) for one in sources], [travel(one.describe()) for one in targets])


def test_transfer(sides):
    """Every version arrives in all targets, and only pickled data goes from one endpoint to another."""
    sources, targets, w, copies = sides
    plan = plan_all(sources, targets)
    orders = [[travel(one) for one in side] for side in (plan.sources, plan.targets)]
    for version in (1, 2, 3):
        w += version
        staged = [travel(one.stage(mine, version)) for one, mine in zip(sources, orders[0], strict=True)]
        for one, mine in zip(targets, orders[1], strict=True):
            one.fetch(mine, staged)
        assert not np.array_equal(np.hstack(copies), w)
        assert [one.commit() for one in targets] == [version] * 2
        assert np.array_equal(np.hstack(copies), w)


def test_plan_is_a_function(sides):
    """The same descriptions give the same orders in any process."""
    sources, targets, _, _ = sides
    described = [one.describe() for one in (*sources, *targets)]
    plans = [plan_endpoints(described[:2], described[2:]) for _ in range(2)]
    assert plans[0].sources == plans[1].sources
    assert plans[0].targets == plans[1].targets
    assert "token" not in repr(described)
    assert "secret" not in repr(plans[0])


def test_membership(sides):
    """Orders of another endpoint, and pieces of a source of another transfer, are refused before anything is opened."""
    sources, targets, _, copies = sides
    plan, other = plan_all(sources, targets), plan_all(sources[:1] + sources[1:], targets[:1] + targets[1:])
    with pytest.raises(PermissionError, match="orders of source 1, which is not this endpoint as a source"):
        sources[0].stage(plan.sources[1], 1)
    with pytest.raises(PermissionError, match="orders of source 0, which is not this endpoint as a target"):
        targets[0].fetch(plan.sources[0], [])
    staged = [one.stage(mine, 1) for one, mine in zip(sources, plan.sources, strict=True)]
    stranger = Endpoint({"w": np.zeros((4, 6))})
    strange = plan_endpoints([stranger.describe()], [targets[0].describe()])
    foreign = stranger.stage(strange.sources[0], 1)
    for pieces in ([foreign, staged[1]], [replace(staged[0], version=2), staged[1]]):
        with pytest.raises(PermissionError, match="Source 0 has not proved that it belongs to this transfer"):
            targets[0].fetch(plan.targets[0], pieces)
    stranger.close()
    assert other.sources == plan.sources
    assert not copies[0].any()


def test_failures_before_the_commit(sides):
    """Each error says what is wrong and what to do, and the tensors stay as they were."""
    sources, targets, _, copies = sides
    plan = plan_all(sources, targets)
    staged = [one.stage(mine, 1) for one, mine in zip(sources, plan.sources, strict=True)]
    with pytest.raises(TransferError, match=r"it needs pieces of source 1, and got those of sources \[0\]"):
        targets[0].fetch(plan.targets[0], staged[:1])
    newer = sources[1].stage(plan.sources[1], 2)
    with pytest.raises(ValueError, match=r"The sources have staged versions \[1, 2\]"):
        targets[0].fetch(plan.targets[0], [staged[0], newer])
    with pytest.raises(TransferError, match="Stage the version again"):
        targets[0].fetch(plan.targets[0], staged)
    staged[1] = sources[1].stage(plan.sources[1], 1)
    targets[0].fetch(plan.targets[0], staged)
    sources[0].stage(plan.sources[0], 1)
    with pytest.raises(TransferError, match="a source has staged again or was closed") as caught:
        targets[0].commit()
    assert (caught.value.phase, caught.value.versions) == ("commit", {0: None})
    with pytest.raises(ValueError, match="Nothing has been fetched"):
        targets[0].commit()
    targets[1].replace({"w": np.zeros((4, 6))})
    with pytest.raises(LayoutMismatchError, match="it has changed since the plan was made: plan again"):
        targets[1].fetch(plan.targets[1], staged)
    assert not copies[0].any()
    targets[0].close()
    with pytest.raises(ValueError, match="has been closed"):
        targets[0].describe()


def test_orders_after_a_failure(sides, monkeypatch):
    """What fails with the orders of one plan leaves those of another one usable."""
    sources, targets, w, copies = sides
    plan, other = plan_all(sources, targets), plan_all(sources, targets[:1])

    def fail(*args):
        raise MemoryError("no memory")

    others = [one.stage(mine, 1) for one, mine in zip(sources, other.sources, strict=True)]
    staged = [one.stage(mine, 1) for one, mine in zip(sources, plan.sources, strict=True)]
    targets[0].fetch(plan.targets[0], staged)
    with monkeypatch.context() as patch:
        patch.setattr(segment, "Segment", fail)
        with pytest.raises(MemoryError):
            sources[0].stage(other.sources[0], 2)
        patch.setattr(end, "await_replies", fail)
        with pytest.raises(MemoryError):
            targets[0].fetch(other.targets[0], others)
    staged = [one.stage(mine, 3) for one, mine in zip(sources, plan.sources, strict=True)]
    targets[0].fetch(plan.targets[0], staged)
    assert targets[0].commit() == 3
    assert np.array_equal(copies[0], w[:, :3])


def test_plans_that_are_refused(sides):
    """A plan needs tensors that fit, and one node."""
    sources, targets, _, _ = sides
    described = [one.describe() for one in (*sources, *targets)]
    with pytest.raises(LayoutMismatchError, match="no source rank holds 12 of the elements"):
        plan_endpoints(described[:1], described[2:])
    far = [replace(one, node="another") for one in described[2:]]
    with pytest.raises(ValueError, match="needs one node"):
        plan_endpoints(described[:2], far)
