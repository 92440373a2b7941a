# SPDX-License-Identifier: Apache-2.0
"""Which workers are lost, and why, without Ray: from errors of replies, nodes, Ray's tables and memory guards."""

from types import SimpleNamespace

import pytest
import ray

from fairlead_placement import HeadTimeoutError
from fairlead_workergroup._membership import losses
from fairlead_workergroup._membership.losses import find_losses, find_lost, read_loss
from fairlead_workergroup._model import Member, Place
from fairlead_workergroup._observe import query


def make_member(rank, node_id="node"):
    slot = SimpleNamespace(node_ip="10.0.0.1")
    place = Place(rank, slot, f"worker {rank}", rank, 0, (0, [rank]), 0, rank, 2, {"dp": rank})
    actor = SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda: None))
    return Member(place, handle=actor, actor_id=f"actor {rank}", node_id=node_id, pid=70 + rank, started=1)


FIRST, SECOND = make_member(0), make_member(1)
DIED = ray.exceptions.ActorDiedError()
UNAVAILABLE = ray.exceptions.ActorUnavailableError("out of reach", b"\0" * 16)
OWN = ray.exceptions.RayTaskError("step", "Traceback", ValueError("wrong"))


class Known:
    """What nodes, the head, actors and guards say; it notes who was asked."""

    def __init__(self, patch, ended=(), dead=(), causes=None, killed=None):
        self.asked = []

        def ask_nodes(members, function, *, within_s, asks_head):
            self.asked.append("nodes")
            return [one in ended for one in members]

        def ask_actors(core, members, within_s):
            self.asked.append("actors")
            return {one: loss for one, loss in (causes or {}).items() if one in members}

        def look_at_head():
            self.asked.append("head")
            return frozenset(one.actor_id for one in dead)

        patch.setattr(losses, "ask_nodes", ask_nodes)
        patch.setattr(losses, "_ask_actors", ask_actors)
        patch.setattr(losses, "dead_actors", look_at_head)
        patch.setattr(losses, "choose_alive", lambda nodes: [one for one in nodes if one != "lost"])
        patch.setattr(losses, "find_killed", lambda members, within_s: killed or {})
        self.core = SimpleNamespace(memory_limit=1)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (DIED, "killed"),
        (ray.exceptions.OutOfMemoryError("too much"), "out-of-memory"),
        (ray.exceptions.ActorUnschedulableError("its node is gone"), "node-lost"),
        (ray.exceptions.NodeDiedError("gone"), "node-lost"),
        (UNAVAILABLE, None),
        (OWN, None),
        (OWN.as_instanceof_cause(), None),
        (ValueError("wrong"), None),
        (None, None),
    ],
)
def test_errors_of_replies(error, kind):
    """Ray's error type tells of a death and its kind; the error of a method tells of none."""
    loss = read_loss(FIRST, error)
    assert (loss and loss.kind) == kind


def test_report():
    """The report of a loss names the process."""
    loss = read_loss(SECOND, DIED)
    assert (loss.rank, loss.coords, loss.node_id, loss.pid) == (1, {"dp": 1}, "node", 71)


def test_an_error_that_tells_of_a_death_asks_nobody(monkeypatch):
    """What the others do is of no interest then."""
    known = Known(monkeypatch, ended=[SECOND])
    assert list(find_losses(known.core, {FIRST: DIED}, silent=[SECOND])) == [FIRST]
    assert known.asked == []


def test_silent_workers_whose_process_has_ended(monkeypatch):
    """When a method fails, its peers that have not answered may be dead: their nodes know."""
    known = Known(monkeypatch, ended=[SECOND])
    lost = find_losses(known.core, {FIRST: OWN}, silent=[SECOND])
    assert [(one.rank, loss.cause) for one, loss in lost.items()] == [(1, losses.NOT_NOTICED)]
    assert "head" not in known.asked


def test_memory_guard(monkeypatch):
    """The memory guard knows better than Ray why a process was killed."""
    known = Known(monkeypatch, killed={FIRST: "it held 5 bytes"})
    (loss,) = find_losses(known.core, {FIRST: DIED}).values()
    assert (loss.kind, loss.cause) == ("out-of-memory", "it held 5 bytes")


@pytest.mark.parametrize("left_s", [0.0, 1.0])
def test_silent_node_with_a_verdict(monkeypatch, left_s):
    """A call whose worker has died with a memory limit does not wait for a silent node a second past its deadline."""
    waited = []

    def run_on_nodes(function, asks, *, timeout_s):
        waited.append(timeout_s)
        return {node_id: TimeoutError("no answer") for node_id in asks}

    monkeypatch.setattr(query, "run_on_nodes", run_on_nodes)
    (loss,) = find_losses(SimpleNamespace(memory_limit=1), {FIRST: DIED}, within_s=left_s).values()
    assert loss.kind == "killed"
    assert 0.5 <= sum(waited) < left_s + 1


def test_dead_workers_that_no_call_has_met(monkeypatch):
    """The head, then the nodes, say who is dead, and the actors why; the node counts more than a kill."""
    third, fourth = make_member(2, "lost"), make_member(3)
    causes = {FIRST: FIRST.failure("exited", "it has exited"), third: third.failure("killed", "it died")}
    known = Known(monkeypatch, ended=[SECOND], dead=[FIRST, third], causes=causes)
    lost = find_lost(known.core, [FIRST, SECOND, third, fourth], 5.0)
    assert {one.rank: (loss.kind, loss.cause) for one, loss in lost.items()} == {
        0: ("exited", "it has exited"),
        1: ("killed", losses.NOT_NOTICED),
        2: ("node-lost", losses.NODE_LOST),
    }


def test_silent_head(monkeypatch):
    """A head that does not answer is an error, and not a group without losses."""
    known = Known(monkeypatch)

    def fail():
        raise HeadTimeoutError("silent")

    monkeypatch.setattr(losses, "dead_actors", fail)
    with pytest.raises(HeadTimeoutError):
        find_lost(known.core, [FIRST], 5.0)
