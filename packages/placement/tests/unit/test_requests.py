# SPDX-License-Identifier: Apache-2.0
"""Requests to several node agents at once, of which some are gone. The seams are Ray and the handles of agents."""

import time

import pytest
import ray

from fairlead_placement import NodeAgent, PlacementError, PlacementTimeoutError
from fairlead_placement._nodes import agent as _agent
from fairlead_placement._nodes.agent import ask_nodes

GONE = ray.exceptions.ActorDiedError()
AWAY = ray.exceptions.ActorUnavailableError("away", None)
LATE = ray.exceptions.GetTimeoutError("late")


@pytest.fixture
def agents(monkeypatch):
    """Return the answers that each node's agents give in order; the last one is repeated. Sleeping is recorded."""
    answers, replaced, slept = {}, [], []

    class Agent:
        def __init__(self, node_id):
            self.node_id = node_id
            self.answer = self

        def remote(self, *_):
            left = answers[self.node_id]
            return left.pop(0) if left[1:] else left[0]

    def find(instead_of):
        replaced.extend(node_id for node_id, dead in instead_of.items() if dead)
        return {node_id: Agent(node_id) for node_id in instead_of}

    def collect(requests, timeout_s):
        found = {key: request() for key, request in requests.items()}
        return {key: (None, one) if isinstance(one, BaseException) else (one, None) for key, one in found.items()}

    monkeypatch.setattr(_agent, "agents_of", find)
    monkeypatch.setattr(_agent, "collect", collect)
    monkeypatch.setattr(time, "sleep", slept.append)
    return answers, replaced, slept


def test_dead_agents_are_replaced_at_once(agents):
    """However many agents have died, the request waits once for all of them before each new attempt."""
    answers, replaced, slept = agents
    answers |= {f"n{at}": [GONE, GONE, AWAY, at] for at in range(5)} | {"fine": ["fine"]}
    assert ask_nodes("memory", dict.fromkeys(answers, ()), 60.0) == {
        "fine": "fine",
        **{f"n{at}": at for at in range(5)},
    }
    assert replaced == [f"n{at}" for at in range(5)] * 2  # one that is only away is asked again
    assert slept == list(_agent.PAUSES_S[:3])


@pytest.mark.parametrize(
    ("failure", "kind", "attempts"), [(GONE, PlacementError, len(_agent.PAUSES_S)), (LATE, PlacementTimeoutError, 0)]
)
def test_the_cause_of_an_agents_failure(agents, failure, kind, attempts):
    """The error of an agent names the node, and has Ray's error as its cause, for one node and for several."""
    answers, _, slept = agents
    answers |= {"n0": [failure], "n1": ["fine"]}
    found = ask_nodes("memory", {"n0": (), "n1": ()}, 60.0)
    assert found["n1"] == "fine"
    assert type(found["n0"]) is kind
    assert "node n0" in str(found["n0"])
    assert found["n0"].__cause__ is failure
    assert len(slept) in (attempts, attempts + 1)
    with pytest.raises(kind, match="node n0") as raised:
        NodeAgent("n0").leased()
    assert raised.value.__cause__ is failure


def test_a_head_that_hangs_while_an_agent_is_replaced(agents, monkeypatch):
    """The answers of the other agents are kept."""
    answers, _, _ = agents
    answers |= {"n0": [GONE], "n1": ["fine"]}
    find = _agent.agents_of

    def hang(instead_of):
        if any(instead_of.values()):
            raise PlacementTimeoutError("no answer of the head")
        return find(instead_of)

    monkeypatch.setattr(_agent, "agents_of", hang)
    found = ask_nodes("memory", {"n0": (), "n1": ()}, 60.0)
    assert (str(found["n0"]), found["n1"]) == ("no answer of the head", "fine")


def test_handles_of_ended_sessions_are_forgotten(monkeypatch):
    """The table of agents has those of this session and job, and does not grow with each Ray of the process."""
    monkeypatch.setattr(_agent, "_handles", {})
    monkeypatch.setattr(_agent, "ask_head", lambda request, create, keys: dict.fromkeys(keys, "agent"))
    for session in ("one", "two"):
        monkeypatch.setattr(_agent, "_key", lambda node_id, session=session: (session, "job", node_id))
        assert _agent.agents_of({"n0": None, "n1": None}) == {"n0": "agent", "n1": "agent"}
    assert {key[0] for key in _agent._handles} == {"two"}
