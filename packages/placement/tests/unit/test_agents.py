# SPDX-License-Identifier: Apache-2.0
"""The agents that this process has, without Ray (seams: requests to agents, and the clock)."""

from types import SimpleNamespace

from fairlead_placement._nodes import agent as agents


def test_many_agents_that_the_head_does_not_know(monkeypatch):
    """The end of agents on many nodes is waited for as long as that on one, while the head is silent."""
    now = [0.0]

    def wait(seconds):
        now[0] += seconds

    monkeypatch.setattr(agents, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(agents, "run_in_thread", lambda *_: SimpleNamespace(over=SimpleNamespace(wait=wait)))
    monkeypatch.setattr(agents, "_send", lambda *_: {})
    mine = {f"node-{number}": agents._Agent(f"node-{number}", None, object(), {"lease": None}) for number in range(16)}
    monkeypatch.setattr(agents, "_agents", dict(mine))
    assert agents.release(dict.fromkeys(mine, ("lease",)), timeout_s=1.0) == {}
    assert agents.nodes_with() == []
    assert now[0] == agents.KILL_S
