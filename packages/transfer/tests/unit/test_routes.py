# SPDX-License-Identifier: Apache-2.0
"""Which transport each pair of ranks takes."""

from types import SimpleNamespace

import pytest

from fairlead_transfer._descriptions import Selection
from fairlead_transfer._routes import Router
from fairlead_transfer._side import EndState, Side
from fairlead_transfer.exceptions import LayoutMismatchError

WHOLE = [("w", "numpy", "float32", 4, (4,), (0,), (4,))]


def make_end(pid):
    return EndState((pid, 0), number=1, described=[*WHOLE])


def make_side(name, pids, nodes="aaa"):
    """Return a side whose workers hold the whole of a tensor."""
    members = tuple(SimpleNamespace(rank=rank, node_id=nodes[rank], lost=None) for rank in range(len(pids)))
    return Side(name, object(), "link", "weights", dict(enumerate(map(make_end, pids))), members)


@pytest.mark.parametrize("transport", ["auto", "object_store"])
def test_transports(transport):
    """Ranks of one node share memory, others use TCP, and everything goes through the object store on request."""
    sides = make_side("source", [1]), make_side("target", [2, 3], nodes="ab")
    router = Router(*sides, Selection(lambda name: name, None, ()), transport)
    route = router.make()
    expected = ("shared_memory", "tcp") if transport == "auto" else ("object_store",) * 2
    assert route.tasks.transports == {(0, 0): expected[0], (0, 1): expected[1]}


def test_link_from_a_group_to_itself():
    """What a process sends to itself is staged too, so that all ranks get the tensors of one moment."""
    sides = make_side("source", [1, 2]), make_side("target", [1, 2])
    sides[1].group = sides[0].group
    route = Router(*sides, Selection(lambda name: name, None, ()), "auto").make()
    assert route.plan.bytes_moved == 2 * 4 * 4
    assert all(tasks["sources"] for tasks in route.tasks.target.values())


@pytest.mark.parametrize("side", [0, 1])
def test_route_is_kept(side):
    """A route is made again only if a process or a description has changed."""
    sides = make_side("source", [1]), make_side("target", [2, 3])
    router = Router(*sides, Selection(lambda name: name, None, ()), "auto")
    route = router.make()
    assert router.kept is route
    sides[side].ends[side] = make_end(9)
    assert router.kept is None


@pytest.mark.parametrize(("exclude", "near"), [("weight", "weights"), ("rotary.*", "rotary_emb")])
def test_exclude_that_matches_nothing(exclude, near):
    """A name or pattern that no tensor of either side has, also by its new name, is refused with names like it."""
    sides = make_side("source", [1]), make_side("target", [2])
    for side, name in zip(sides, ("weights", "rotary_emb"), strict=True):
        side.ends[0].described.append((name, *WHOLE[0][1:]))

    def make(*patterns):
        return Router(*sides, Selection(lambda name: f"new.{name}", None, patterns), "auto").make()

    assert make("w", "new.*", "rotary_*").plan.bytes_moved == 0
    with pytest.raises(LayoutMismatchError) as caught:
        make("w", exclude)
    (mismatch,) = caught.value.mismatches
    assert "exclude= has this name or pattern, and neither side does" in mismatch.reason
    assert (mismatch.name, repr(near) in mismatch.reason) == (exclude, True)
