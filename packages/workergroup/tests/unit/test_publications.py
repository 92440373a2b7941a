# SPDX-License-Identifier: Apache-2.0
"""The groups that are published on boards, as other processes find them, without Ray."""

import pytest

from fairlead_placement.extension import Board
from fairlead_sharding import NamedSharding
from fairlead_workergroup import WorkerGroupError
from fairlead_workergroup._observe.publications import find_group, find_groups

from ..faults import let_boards_have, publish, read_published

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
    about |= {"publication": epoch, "methods": {}}
    fields = {"name": "w", "coords": {}, "address": "", "started": 1, "restarts": 0, "actor_id": ""}
    members = [{**fields, "mark": "", "incarnation": 0, **row} for row in rows]
    return publish({**about, "members": members, **changes})


def test_boards(monkeypatch):
    """Each board has the groups of its process; those of other versions of the library are left out."""
    first, second, silent = (Board("01", owner, owner, None) for owner in ("a", "b", "c"))
    boards = {
        first: board(7, {"rank": 0, "node_id": "a", "pid": 1}, {"rank": 1, "node_id": "b", "pid": 3}),
        second: board(5, schema=99),
        silent: TimeoutError("no answer"),
    }
    let_boards_have(monkeypatch, boards)
    (found,) = find_groups()
    assert [(one.rank, one.node_id, one.pid) for one in found.members] == [(0, "a", 1), (1, "b", 3)]
    assert (found.epoch, found.publication, found.sharding, found.board) == (7, 7, MESH, first)


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
    let_boards_have(monkeypatch, {Board("01", str(at), str(at), None): one for at, one in enumerate(boards)})
    if found not in names:
        with pytest.raises(WorkerGroupError, match=found):
            find_group(asked)
    else:
        assert find_group(asked).group_id == found.ljust(32, "0")


def test_silent_board(monkeypatch):
    """A board that does not answer does not mean that the group has ended."""
    own = Board("01", "a", "a", None)
    let_boards_have(monkeypatch, {own: TimeoutError("no answer")})
    with pytest.raises(WorkerGroupError, match=r"cannot be looked up, because the agent .* does not answer"):
        read_published(monkeypatch, "g")
    let_boards_have(monkeypatch, {own: {}})
    assert read_published(monkeypatch, "g") is None
