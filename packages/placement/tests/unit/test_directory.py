# SPDX-License-Identifier: Apache-2.0
"""The checks of what a process has published, without Ray."""

import collections
import threading

import pytest
import ray

from fairlead_placement import PlacementTimeoutError
from fairlead_placement._nodes import directory
from fairlead_placement._ray_private import block_shutdown
from fairlead_placement.extension import Rounds


@pytest.fixture(autouse=True)
def rounds(monkeypatch):
    """Check all the time what this process has published."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(directory, "this_process", lambda: "me")
    monkeypatch.setattr(directory, "choose_alive", list)
    monkeypatch.setattr(directory, "_notify", lambda requests: None)
    monkeypatch.setattr(directory, "_published", published := {})
    made = Rounds(0.01, directory._check, lambda: bool(published), exit_s=30)
    monkeypatch.setattr(directory, "_rounds", made)
    yield made
    made.close()


def test_an_agent_that_hangs_does_not_delay_a_shutdown(monkeypatch):
    """A shutdown of Ray does not wait for a check that has begun, in which an agent hangs."""
    hangs = threading.Event()
    began, limits = threading.Event(), []

    def hang(method, arguments, timeout_s):
        limits.append(timeout_s)
        began.set()
        assert hangs.wait(30)
        return dict.fromkeys(arguments, TimeoutError())

    monkeypatch.setattr(directory, "ask_nodes", hang)
    directory.publish("key", 1, {"node": "value"})
    assert began.wait(30)
    with block_shutdown():
        assert not hangs.is_set()
    hangs.set()
    assert set(limits) == {directory.CHECK_S}


def test_many_nodes_are_asked_in_turn(rounds, monkeypatch):
    """However many nodes there are, a check asks some of them, and all of them have their turn."""
    nodes, sizes, asked, done = 1001, [], collections.Counter(), threading.Event()

    def answer(method, arguments, timeout_s):
        sizes.append(len(arguments))
        asked.update(list(arguments))
        if sum(asked.values()) >= 3 * nodes:
            done.set()
        return {node_id: {"key": 1} for node_id in arguments}

    monkeypatch.setattr(directory, "ask_nodes", answer)
    directory.publish("key", 1, {f"{at:056x}": "value" for at in range(nodes)})
    assert done.wait(30)
    rounds.close()
    # In as few turns as allow at most `CHECKED_AT_ONCE` nodes each.
    assert set(sizes) == {91}
    assert len(asked) == nodes
    assert max(asked.values()) - min(asked.values()) <= 1


def test_what_is_lost_with_an_agent(monkeypatch):
    """What else an agent has lost starts again before its values are published again; a failure is tried again."""
    tried, published, done = [], [], threading.Event()

    def start_again(node_ids):
        tried.append((list(node_ids), list(published)))
        if len(tried) == 1:
            raise PlacementTimeoutError("the agent did not answer")

    def notify(requests):
        published.extend(requests)
        if len(published) == 3:
            done.set()

    def answer(method, arguments, timeout_s):
        return {"kept": {"key": 1}, "lost": {"key": 1} if published.count("lost") == 2 else {}}

    monkeypatch.setattr(directory, "ask_nodes", answer)
    monkeypatch.setattr(directory, "_notify", notify)
    directory.publish("key", 1, {"kept": "value", "lost": "value"}, on_loss=start_again)
    assert done.wait(30)
    assert published == ["kept", "lost", "lost"]
    assert tried == [(["lost"], ["kept", "lost"])] * 2


def test_a_withdrawal_during_a_check(monkeypatch):
    """What is withdrawn while agents are asked for it is not published again where a new agent does not have it."""
    sent, done = [], threading.Event()

    def answer(method, arguments, timeout_s):
        directory.withdraw("key", ["node"])
        done.set()
        return {"node": {}}

    monkeypatch.setattr(directory, "ask_nodes", answer)
    monkeypatch.setattr(directory, "_notify", lambda requests: sent.extend(request[0] for request in requests.values()))
    directory.publish("key", 1, {"node": "value"})
    assert done.wait(30)
    assert directory._rounds.close(30)
    assert sent == ["publish", "release"]
