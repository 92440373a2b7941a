# SPDX-License-Identifier: Apache-2.0
"""The requests to enforce a memory limit, without Ray."""

from types import SimpleNamespace

import pytest

from fairlead_workergroup import WorkerGroupError
from fairlead_workergroup._observe import memory
from fairlead_workergroup._world import Deadline
from fairlead_workergroup.spi import WorkerProcess


def test_silent_agent_of_a_group_that_ends(monkeypatch):
    """A shutdown of another thread ends the requests to an agent that does not answer, long before the deadline."""
    ended = WorkerGroupError("policy: it has been shut down")
    roster = SimpleNamespace(ending=False, ended_error=lambda: ended)
    asks = []

    def ask_nodes(workers, *_, **__):
        assert len(asks) < 3, "the agent is asked after the shutdown"
        asks.append(workers)
        roster.ending = len(asks) == 3
        return [None] * len(workers)

    monkeypatch.setattr(memory, "PAUSE_S", 0.0)
    monkeypatch.setattr(memory, "ask_nodes", ask_nodes)
    monkeypatch.setattr(memory, "_is_gone", lambda node_id: False)
    limit, workers = memory.MemoryLimit("token", 1000), [WorkerProcess(0, {}, "a", "10.0.0.1")]
    with pytest.raises(WorkerGroupError) as caught:
        limit.guard(workers, Deadline.after(600.0), roster)
    assert caught.value is ended
    assert len(asks) == 3
