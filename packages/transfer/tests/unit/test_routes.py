# SPDX-License-Identifier: Apache-2.0
"""Which transport each pair of ranks takes."""

from types import SimpleNamespace

import pytest

from fairlead_transfer._descriptions import Selection
from fairlead_transfer._routes import Router
from fairlead_transfer._side import EndState, Side

WHOLE = [("w", "numpy", "float32", 4, (4,), (0,), (4,))]


def make_end(pid):
    return EndState((pid, 0), number=1, described=WHOLE)


def make_side(name, pids):
    """Return a side whose workers run on one node, and hold the whole of a tensor."""
    members = tuple(
        SimpleNamespace(rank=rank, process=SimpleNamespace(node_id="node"), failure=None) for rank in range(len(pids))
    )
    return Side(name, object(), "link", "weights", dict(enumerate(map(make_end, pids))), members)


@pytest.fixture
def sides():
    return make_side("source", [1]), make_side("target", [2, 3])


@pytest.fixture
def router(sides):
    """Return a router after target rank 1 could not read the memory of source rank 0."""
    router = Router(*sides, Selection(lambda name: name, None, ()), "auto")
    route = router.make()
    assert route.tasks.transports == {(0, 0): "shared_memory", (0, 1): "shared_memory"}
    router.block(sides[0], 0, 1, "shared_memory", "no permission")
    return router


def test_blocked_pair_takes_the_next_transport(router):
    """The pair takes another transport, and `explain` says why; other pairs do not change."""
    route = router.make()
    assert route.tasks.transports == {(0, 0): "shared_memory", (0, 1): "tcp"}
    assert "no permission" in router.explain(route).reasons["tcp"]


def test_ranks_that_cannot_connect(router, sides):
    """After shared memory and TCP the object store is left."""
    router.block(sides[0], 0, 1, "tcp", "its port is closed")
    route = router.make()
    assert route.tasks.transports == {(0, 0): "shared_memory", (0, 1): "object_store"}
    assert "its port is closed" in router.explain(route).reasons["object_store"]


@pytest.mark.parametrize("side", [0, 1])
def test_block_ends_with_the_process(router, sides, side):
    """A rank that has been started again may be able to do what it could not before."""
    sides[side].ends[side] = make_end(9)
    assert set(router.make().tasks.transports.values()) == {"shared_memory"}


def test_block_is_not_about_other_processes_of_that_rank(router):
    """What holds for source rank 0 says nothing about target rank 0, which sends to target rank 1 in a sync."""
    replicas = make_side("replica", [2, 3])
    assert router.make_from_replicas(replicas, [0], [1]).tasks.transports == {(0, 1): "shared_memory"}
