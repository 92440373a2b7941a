# SPDX-License-Identifier: Apache-2.0
"""The groups that are published on boards, as other processes find them, without Ray."""

import pytest

from fairlead_placement.extension import Board
from fairlead_sharding import NamedSharding
from fairlead_workergroup import WorkerGroupError
from fairlead_workergroup._observe.publications import find_group

from ..faults import let_boards_have, publish, read_published

MESH = NamedSharding.from_shape(dp=2, tp=2)


def board(**about):
    """Return what a board has of a group without members."""
    named = {"namespace": "ns", "driver": {"job_id": "01"}, "created": 1.0, "epoch": 1, "publication": 1}
    described = {"class": "Trainer", "shape": MESH.shape, "layout": MESH.to_dict(), "methods": {}, "members": []}
    return publish({**named, **described, **about})


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
    boards = [board(id=one.ljust(32, "0"), name=name) for one, name in names.items()]
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
