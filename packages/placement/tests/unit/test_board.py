# SPDX-License-Identifier: Apache-2.0
"""Tests of what is published at a node agent, without Ray."""

import threading
from types import SimpleNamespace

import ray

from fairlead_placement import HeadTimeoutError, PlacementError
from fairlead_placement._nodes import agent as agent_module
from fairlead_placement._nodes import directory
from fairlead_placement._nodes.agent_process import AgentProcess
from fairlead_placement._nodes.board import WITHDRAWN_KEPT, Board


def test_versions():
    """The latest version is kept, whichever request arrives first."""
    board = Board()
    board.publish("key", 2, "new", "me")
    board.publish("key", 1, "old", "me")
    assert board.published() == {"key": "new"}
    board.publish("key", 3, "newest", "me")
    assert board.published() == {"key": "newest"}


def test_withdrawal():
    """A value that was withdrawn is not published by a late request, and a withdrawal can be repeated."""
    board = Board()
    board.withdraw("key")
    board.publish("key", 1, "late", "me")
    board.withdraw("key")
    assert board.published() == {}


def test_few_withdrawals_are_kept():
    """A long-lived agent does not grow with each group that has ended."""
    board = Board()
    for number in range(WITHDRAWN_KEPT + 10):
        board.withdraw(str(number))
    assert len(board._withdrawn) == WITHDRAWN_KEPT


def test_newer():
    """A reader that has the latest version gets no value; one of a key that is not there gets version 0."""
    agent = AgentProcess()
    agent.publish("key", 3, "value", "me")
    assert agent.newer("key", 2) == (3, "value")
    assert agent.newer("key", 3) == (3, None)
    assert agent.newer("other", 0) == (0, None)
    assert (agent.versions("me"), agent.versions("them")) == ({"key": 3}, {})


def test_agents_are_started_together(monkeypatch):
    """Agents that are missing are created several at a time, each once, with one look at the driver for all."""
    created, looks = [], []
    together = threading.Barrier(3)

    def create(actor_class, args, *, name, **options):
        created.append(name)
        together.wait(60)  # breaks if they are created one after the other
        return name

    monkeypatch.setattr(agent_module, "create_actor", create)
    monkeypatch.setattr(agent_module, "worker_is_alive", lambda driver: looks.append(driver) or True)
    monkeypatch.setattr(agent_module, "_key", lambda node_id: ("session", "01", node_id))
    monkeypatch.setattr(agent_module, "this_process", lambda: "me")
    monkeypatch.setattr(agent_module, "_actor_class", lambda: None)
    monkeypatch.setattr(agent_module, "clean_runtime_env", lambda: None)
    monkeypatch.setattr(agent_module, "_handles", handles := {("session", "01", "b"): "known"})
    nodes = [*(node * 56 for node in "acd"), "b", "a" * 56]
    agent_module._sees_processes.cache_clear()
    agent_module.start_agents(nodes)
    assert sorted(created) == [f"fairlead-agent-01-{node * 56}" for node in "acd"]
    assert len(looks) == 1
    assert set(handles) == {("session", "01", node) for node in nodes}
    agent_module.start_agents(nodes)
    assert len(created) == 3


def test_agents_of_all_jobs(monkeypatch):
    """Agents are found by their names; other actors in the namespace are not."""
    rows = [
        {"name": "fairlead-agent-01000000-aa", "namespace": "fairlead"},
        {"name": "fairlead-agent-02000000-aa", "namespace": "fairlead"},
        {"name": "fairlead-agent-03000000-bb", "namespace": "fairlead"},
        {"name": "fairlead-agent-04000000-cc", "namespace": "of-somebody-else"},
        {"name": "something", "namespace": "fairlead"},
    ]

    def get_actor(name, namespace):
        if "03000000" in name:
            raise ValueError("it has ended meanwhile")
        return SimpleNamespace(name=name)

    monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: rows)
    monkeypatch.setattr(ray, "get_actor", get_actor)
    found = [(agent.job_id, agent.node_id) for agent in directory.find_agents()]
    assert found == [("01000000", "aa"), ("02000000", "aa")]


def test_head_that_hangs(monkeypatch, caplog):
    """When Ray's head does not answer, a publication waits for it once, and not for each node."""
    asked = []

    def notify(node_id, *_):
        asked.append(node_id)
        raise HeadTimeoutError("the head did not answer")

    monkeypatch.setattr(directory, "notify_node", notify)
    monkeypatch.setattr(directory, "start_agents", lambda node_ids: None)
    directory.withdraw("key", ["a", "b", "c"])
    assert asked == ["a"]
    assert "the agents of 3 nodes: the head did not answer" in caplog.text


def test_head_that_hangs_while_agents_start(monkeypatch, caplog):
    """So does one whose agents are not there yet."""

    def start(node_ids):
        raise HeadTimeoutError("the head did not answer")

    monkeypatch.setattr(directory, "start_agents", start)
    directory.withdraw("key", ["a", "b", "c"])
    assert "the agents of 3 nodes: the head did not answer" in caplog.text


def test_node_that_is_gone(monkeypatch, caplog):
    """A node whose agent cannot be reached is left out, with a line in the log."""
    asked = []

    def notify(node_id, *_):
        asked.append(node_id)
        if node_id == "a":
            raise PlacementError("the node is gone")

    monkeypatch.setattr(directory, "notify_node", notify)
    monkeypatch.setattr(directory, "start_agents", lambda node_ids: None)
    directory.withdraw("key", ["a", "b"])
    assert asked == ["a", "b"]
    assert "the node is gone" in caplog.text
