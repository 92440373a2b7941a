# SPDX-License-Identifier: Apache-2.0
"""What one process publishes and others read."""

import os
import signal

from fairlead_placement._nodes import agent as _agent
from fairlead_placement.extension import await_published, find_boards, publish, read_board, read_boards, withdraw


def test_agent_that_dies(local_ray, agent_pids, eventually):
    """What an agent has lost is published again by its owner, unasked, and what was withdrawn is not."""

    def read():
        return [board for board in read_boards(find_boards(), "", timeout_s=60).values() if isinstance(board, dict)]

    publish("first", 3, "kept")
    publish("second", 1, "withdrawn")
    assert await_published("first", timeout_s=60)
    assert read() == [{"first": "kept", "second": "withdrawn"}]
    (board,) = find_boards()
    assert [read_board(board, key, 2, timeout_s=60) for key in ("first", "second", "other")] == [
        (3, "kept"),
        (1, None),
        (0, None),
    ]
    (pid,) = agent_pids()
    os.kill(pid, signal.SIGKILL)
    withdraw("second")
    assert eventually(lambda: read() == [{"first": "kept"}])
    withdraw("first")
    assert not await_published("first", timeout_s=60)
    assert eventually(lambda: read() == [{}])


def test_withdrawn_before_there_is_an_agent(local_ray, agent_pids, eventually, monkeypatch):
    """What was withdrawn while its agent was created is not published (seam: the creation of an agent)."""
    for pid in agent_pids():
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not _agent._agents)
    create, created = _agent._create_actor, []

    def withdraw_first(node_id):
        withdraw("early")
        created.append(node_id)
        return create(node_id)

    with monkeypatch.context() as patch:
        patch.setattr(_agent, "_create_actor", withdraw_first)
        publish("early", 1, "value")
    assert len(created) == 1
    assert eventually(lambda: [*read_boards(find_boards(), "", timeout_s=60).values()] == [{}])
