# SPDX-License-Identifier: Apache-2.0
"""Requests to several node agents at once, of which some die. The seams are Ray and the creation of agents."""

import time
from types import SimpleNamespace

import pytest
import ray

from fairlead_placement import HeadTimeoutError, PlacementError, PlacementTimeoutError
from fairlead_placement._nodes import agent as _agent
from fairlead_placement._nodes import board
from fairlead_placement._nodes.agent import ask_agents, nodes_with, release

GONE = ray.exceptions.ActorDiedError()
AWAY = ray.exceptions.ActorUnavailableError("away", None)
LATE = ray.exceptions.GetTimeoutError("late")


class Agents:
    """Agents that give prepared answers in order; the last one is repeated."""

    def __init__(self):
        self.answers = {}
        self.created = []
        self.killed = []
        self.slept = []

    def create(self, node_id):
        self.created.append(node_id)
        answer = SimpleNamespace(remote=lambda *_: self.answer(node_id))
        released = SimpleNamespace(remote=lambda *_: None)
        return SimpleNamespace(node_id=node_id, lease=answer, publish=answer, release=released)

    def answer(self, node_id):
        left = self.answers[node_id]
        return left.pop(0) if left[1:] else left[0]


@pytest.fixture
def agents(monkeypatch):
    made = Agents()

    def collect(requests, timeout_s):
        found = {key: request() for key, request in requests.items()}
        return {key: (None, one) if isinstance(one, BaseException) else (one, None) for key, one in found.items()}

    monkeypatch.setattr(_agent, "_agents", {})
    monkeypatch.setattr(_agent, "_create_actor", made.create)
    monkeypatch.setattr(_agent, "_watch", lambda agent: None)
    monkeypatch.setattr(_agent, "refuse_client", lambda: None)
    monkeypatch.setattr(_agent, "ask_head", lambda request, function, *args, **_: function(*args))
    monkeypatch.setattr(_agent, "connection", lambda: "here")
    monkeypatch.setattr(_agent, "collect", collect)
    monkeypatch.setattr(ray, "kill", lambda handle: made.killed.append(handle.node_id))
    monkeypatch.setattr(_agent, "time", SimpleNamespace(monotonic=time.monotonic, sleep=made.slept.append))
    return made


def ask(agents, method="lease", **options):
    nodes = agents.answers
    return ask_agents(method, dict.fromkeys(nodes, ()), dict.fromkeys(nodes, ("mine",)), timeout_s=60.0, **options)


def test_dead_agents_are_replaced_at_once(agents):
    """However many agents have died, the request waits once for all of them before each new attempt."""
    agents.answers |= {f"n{at}": [GONE, GONE, AWAY, at] for at in range(5)} | {"fine": ["fine"]}
    assert ask(agents) == {"fine": "fine", **{f"n{at}": at for at in range(5)}}
    # One that is only away is asked again.
    assert sorted(agents.created) == sorted([f"n{at}" for at in range(5)] * 3 + ["fine"])
    assert agents.slept == [0.05, 0.1, 0.2]
    assert nodes_with("mine") == [*agents.answers][-1:] + [f"n{at}" for at in range(5)]


def test_a_request_that_is_not_repeated(agents):
    """A function that ends its agent is called once."""
    agents.answers["n0"] = [GONE, "again"]
    assert isinstance(ask(agents, repeat=False)["n0"], PlacementError)
    assert agents.answers["n0"] == ["again"]


@pytest.mark.parametrize(("failure", "kind"), [(RuntimeError("broken"), RuntimeError), (LATE, PlacementTimeoutError)])
def test_the_cause_of_an_agents_failure(agents, failure, kind):
    """The error of an agent names the node, and does not hide what the others answer."""
    agents.answers |= {"n0": [failure], "n1": ["fine"]}
    answers = ask(agents)
    assert answers["n1"] == "fine"
    assert type(answers["n0"]) is kind
    assert answers["n0"] is failure or (answers["n0"].__cause__ is failure and "node n0" in str(answers["n0"]))


def test_an_agent_lives_as_long_as_it_holds_something(agents):
    """An agent ends with the last name that it holds, and a dead one is reported to whoever held something."""
    lost = []
    agents.answers["n0"] = ["held"]
    for name in ("a", "b"):
        ask_agents("lease", {"n0": ()}, {"n0": (name,)}, timeout_s=60.0, on_loss=lambda *loss: lost.append(loss))
    assert agents.created == ["n0"]
    assert release({"n0": ["a"], "n1": ["unknown"]}, timeout_s=60.0) == {}
    assert agents.killed == []
    release({"n0": ["b"]}, timeout_s=60.0)
    assert (agents.killed, nodes_with()) == (["n0"], [])
    ask_agents("lease", {"n0": ()}, {"n0": ("c",)}, timeout_s=60.0, on_loss=lambda *loss: lost.append(loss))
    _agent._lose(_agent._agents["n0"], "it was\n\tlong")
    assert lost == [("n0", ["c"], "it was")]
    assert nodes_with() == []


def test_a_head_that_hangs_while_an_agent_is_replaced(agents, monkeypatch):
    """The answers of the other agents are kept, and nothing is held where no agent could be created."""
    agents.answers |= {"n0": [GONE], "n1": ["fine"]}

    def create_once(request, function, **_):
        if agents.created:
            raise HeadTimeoutError("no answer of the head")
        return function()

    monkeypatch.setattr(_agent, "ask_head", create_once)
    answers = ask(agents)
    assert (str(answers["n0"]), answers["n1"]) == ("no answer of the head", "fine")
    assert nodes_with() == ["n1"]


def test_agents_of_an_earlier_connection(agents, monkeypatch):
    """After another `ray.init`, agents of the Ray before are not used, nor killed."""
    agents.answers["n0"] = ["held"]
    ask(agents)
    monkeypatch.setattr(_agent, "connection", lambda: "later")
    assert release({"n0": ["mine"]}, timeout_s=60.0) == {}
    ask(agents)
    assert (agents.created, agents.killed) == (["n0", "n0"], [])


def test_boards_of_all_jobs(monkeypatch):
    """Boards are found by their names; other actors in the namespace are not."""
    rows = [
        {"name": "fairlead-agent-01000000-aa-1", "namespace": "fairlead"},
        {"name": "fairlead-agent-02000000-aa-2", "namespace": "fairlead"},
        {"name": "fairlead-agent-03000000-bb-3", "namespace": "fairlead"},
        {"name": "fairlead-agent-04000000-cc-4", "namespace": "of-somebody-else"},
        {"name": "something", "namespace": "fairlead"},
    ]

    def get_actor(name, namespace):
        if "03000000" in name:
            raise ValueError("it has ended")
        return SimpleNamespace(name=name)

    monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: rows)
    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(board, "ask_head", lambda request, function, *args: function(*args))
    assert [(one.job_id, one.owner) for one in board.find_boards()] == [("01000000", "aa"), ("02000000", "aa")]
    assert [one.job_id for one in board.find_boards("02000000", "aa")] == ["02000000"]
