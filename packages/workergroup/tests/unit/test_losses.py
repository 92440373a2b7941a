# SPDX-License-Identifier: Apache-2.0
"""Which workers are lost, and why, without Ray: the errors of replies, and the verdicts of memory guards."""

from types import SimpleNamespace

import pytest
import ray

from fairlead_workergroup._membership import losses
from fairlead_workergroup._membership.losses import find_losses, find_lost, read_loss
from fairlead_workergroup._model import Member, Place
from fairlead_workergroup._observe import query

PLACE = Place(1, SimpleNamespace(node_ip="10.0.0.1"), "a worker", 1, 0, (0, [1]), 0, 1, 2, {"dp": 1})
MEMBER = Member(PLACE, handle=None, actor_id="an actor", node_id="node", pid=71, started=1)
DIED = ray.exceptions.ActorDiedError()
UNAVAILABLE = ray.exceptions.ActorUnavailableError("out of reach", b"\0" * 16)
OWN = ray.exceptions.RayTaskError("step", "Traceback", ValueError("wrong"))


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
    loss = read_loss(MEMBER, error)
    assert (loss and loss.kind) == kind
    assert loss is None or (loss.rank, loss.coords, loss.node_id, loss.pid) == (1, {"dp": 1}, "node", 71)


def test_killed_by_a_shutdown():
    """A worker that its group has killed is shut down; one that had died before keeps its kind."""
    killed = ray.exceptions.ActorDiedError()
    killed.error_msg = "The actor is dead because it was killed by `ray.kill`."
    for error, is_ending, kind in (
        (killed, True, "shut-down"),
        (killed, False, "killed"),
        (DIED, True, "killed"),
    ):
        core = SimpleNamespace(memory_limit=0, ending=is_ending)
        assert find_losses(core, {MEMBER: error})[MEMBER].kind == kind


@pytest.mark.parametrize("left_s", [0.0, 1.0])
def test_silent_node_with_a_verdict(monkeypatch, left_s):
    """A call whose worker has died with a memory limit does not wait for a silent node a second past its deadline."""
    waited = []

    def run_on_nodes(function, asks, *, timeout_s):
        waited.append(timeout_s)
        return {node_id: TimeoutError("no answer") for node_id in asks}

    monkeypatch.setattr(query, "run_on_nodes", run_on_nodes)
    (loss,) = find_losses(SimpleNamespace(memory_limit=1, ending=False), {MEMBER: DIED}, within_s=left_s).values()
    assert loss.kind == "killed"
    assert 0.5 <= sum(waited) < left_s + 1


@pytest.mark.parametrize(("known", "kind"), [("preempted", "preempted"), ("killed", "node-lost"), (None, "node-lost")])
def test_lost_node_that_was_drained(monkeypatch, known, kind):
    """Of a worker that no call has met and whose node is lost, the actor knows whether the node was drained."""
    causes = {MEMBER: MEMBER.failure(known, "its actor says so")} if known else {}
    monkeypatch.setattr(losses, "dead_actors", frozenset)
    monkeypatch.setattr(losses, "choose_alive", lambda nodes: [])
    monkeypatch.setattr(losses, "_ask_actors", lambda core, members, within_s: causes)
    (loss,) = find_lost(SimpleNamespace(memory_limit=0), [MEMBER], 5.0).values()
    assert loss.kind == kind
