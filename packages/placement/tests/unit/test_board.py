# SPDX-License-Identifier: Apache-2.0
"""Tests of what is published at a node agent, without Ray."""

import threading
from types import SimpleNamespace

import ray

from fairlead_placement import HeadTimeoutError
from fairlead_placement._nodes import agent as agent_module
from fairlead_placement._nodes import directory
from fairlead_placement._nodes.agent_process import RELEASED_KEPT, AgentProcess


def test_versions():
    """The latest version is kept, whichever request arrives first."""
    agent = AgentProcess()
    agent.publish("key", 2, "new", "me")
    agent.publish("key", 1, "old", "me")
    assert agent.published() == {"key": "new"}
    agent.publish("key", 3, "newest", "me")
    assert agent.published() == {"key": "newest"}


def test_withdrawal():
    """A value that was withdrawn is not published by a late request, and a withdrawal can be repeated."""
    agent = AgentProcess()
    agent.release(["key"])
    agent.publish("key", 1, "late", "me")
    agent.release(["key"])
    assert agent.published() == {}


def test_few_released_names_are_kept():
    """A long-lived agent does not grow with each group that has ended."""
    agent = AgentProcess()
    for number in range(RELEASED_KEPT + 10):
        agent.release([str(number)])
    assert len(agent._released) == RELEASED_KEPT


def test_newer():
    """A reader that has the latest version gets no value; one of a key that is not there gets version 0."""
    agent = AgentProcess()
    agent.publish("key", 3, "value", "me")
    assert agent.newer("key", 2) == (3, "value")
    assert agent.newer("key", 3) == (3, None)
    assert agent.newer("other", 0) == (0, None)
    assert (agent.versions("me"), agent.versions("them")) == ({"key": 3}, {})


def test_agents_are_started_together(monkeypatch):
    """Agents that are missing are created several at a time, each once; so are those in the place of dead ones."""
    created = []
    together = threading.Barrier(3)

    def create(actor_class, args, *, name, **options):
        created.append(name)
        together.wait(60)  # breaks if they are created one after the other
        return name

    monkeypatch.setattr(agent_module, "create_actor", create)
    monkeypatch.setattr(agent_module, "_key", lambda node_id: ("session", "01", node_id))
    monkeypatch.setattr(agent_module, "_actor_class", lambda: None)
    a, b, c, d = (node * 56 for node in "abcd")
    monkeypatch.setattr(agent_module, "_handles", {("session", "01", node): f"known {node}" for node in (b, c)})
    made = {node: f"fairlead-agent-01-{node}" for node in (a, c, d)}
    for _ in range(2):  # the second time, one has been replaced already
        assert agent_module.agents_of({a: None, b: None, c: f"known {c}", d: None}) == {**made, b: f"known {b}"}
        assert sorted(created) == sorted(made.values())


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

    def find(nodes):
        asked.append(list(nodes))
        raise HeadTimeoutError("the head did not answer")

    monkeypatch.setattr(directory, "agents_of", find)
    directory.withdraw("key", ["a", "b", "c"])
    assert asked == [["a", "b", "c"]]
    assert "the agents of 3 nodes: the head did not answer" in caplog.text
