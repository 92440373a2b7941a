# SPDX-License-Identifier: Apache-2.0
"""The groups that agents publish, as other processes find them, without Ray."""

import pytest

from fairlead_placement.extension import Agent
from fairlead_sharding import NamedSharding
from fairlead_workergroup import WorkerGroupError
from fairlead_workergroup._observe.publications import find_group
from fairlead_workergroup.spi import find_groups

from ..faults import let_agents_have, publish

MESH = NamedSharding.from_shape(dp=2, tp=2)


def board(epoch, *rows, **changes):
    about = {
        "id": "g",
        "name": "policy",
        "class": "Trainer",
        "shape": MESH.shape,
        "layout": MESH.to_dict(),
    }
    about |= {"created": 1.0, "namespace": "ns", "driver": {"job_id": "01"}, "epoch": epoch}
    about["publication"] = epoch
    fields = {"name": "w", "coords": {}, "address": "", "started": 1, "restarts": 0, "actor_id": ""}
    members = [{**fields, "mark": "", "incarnation": 0, **row} for row in rows]
    return {**publish({**about, "members": members, **changes}), "of-somebody-else": 3}


def test_merge(monkeypatch):
    """The boards of a group's nodes become one group, of each rank the latest; others are left out."""
    first, second, silent = (Agent("01", node, None) for node in ("a", "b", "c"))

    def merge(boards):
        let_agents_have(monkeypatch, boards)
        return find_groups()

    boards = {
        first: board(5, {"rank": 0, "node_id": "a", "pid": 1}, {"rank": 1, "node_id": "a", "pid": 2}),
        second: board(7, {"rank": 1, "node_id": "b", "pid": 3}),
        silent: TimeoutError("no answer"),
    }
    (found,) = merge(boards)
    assert [(one.rank, one.node_id, one.pid) for one in found.members] == [(0, "a", 1), (1, "b", 3)]
    assert (found.epoch, found.sharding, found.agents) == (7, MESH, {"a": first, "b": second})
    assert merge({first: board(5, schema=99)}) == []
    assert (found.publication, found.settled) == (7, False)
    rows = [{"rank": rank, "node_id": "a", "pid": 1} for rank in range(4)]
    (found,) = merge({first: board(8, *rows), second: board(8)})
    assert (found.publication, found.settled) == (8, True)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("c", "33"),  # the name of one group, and the beginning of the id of another
        ("cafe00", "33cafe"),  # the same with enough digits
        ("cafe11", "cafe11"),
        ("cafe1100", "cafe11"),
        ("cafe1", "There is no group 'cafe1'"),  # fewer digits than are shown
        ("cafe", "There is no group 'cafe'"),
        ("twin", "Choose one of several groups"),
    ],
)
def test_name_or_id(asked, found, monkeypatch):
    """A name chooses before ids, and the beginning of an id counts from the six digits that are shown."""
    names = {"33": "c", "33cafe": "cafe00", "cafe00": "policy", "cafe11": "critic", "a": "twin", "b": "twin"}
    boards = [board(1, id=one.ljust(32, "0"), name=name) for one, name in names.items()]
    let_agents_have(monkeypatch, {Agent("01", str(at), None): one for at, one in enumerate(boards)})
    if found not in names:
        with pytest.raises(WorkerGroupError, match=found):
            find_group(asked)
    else:
        assert find_group(asked).group_id == found.ljust(32, "0")
