# SPDX-License-Identifier: Apache-2.0
"""What one process publishes and others read."""

import os
import signal

from fairlead_placement._nodes import agent as _agent
from fairlead_placement.extension import await_published, find_boards, publish, read_boards, withdraw

PUBLISHER = """
    import os, signal, time
    import ray
    from fairlead_placement import init_ray
    from fairlead_placement.extension import await_published, find_boards, publish, read_board, read_boards, withdraw
    init_ray(address="local", num_cpus=1)

    def read(wanted):
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline:
            boards = [board for board in read_boards(find_boards(), "", timeout_s=60).values() if type(board) is dict]
            if boards == wanted:
                break
            time.sleep(0.05)
        return boards
"""


def test_published(start_script):
    """What a process publishes is read from another job, and goes when it is withdrawn or the process ends."""
    publisher = start_script(
        PUBLISHER
        + """
    publish("first", 1, {"rank": 3})
    publish("second", 1, {"rank": 4})
    print(ray.get_runtime_context().gcs_address, flush=True)
    input()
    withdraw("first")
    print("withdrawn", flush=True)
    input()
    withdraw("second")
    print(read([]), flush=True)
    """,
        RAY_AUTH_MODE="disabled",
    )
    reader = start_script(
        PUBLISHER.replace('address="local", num_cpus=1', f'address="{publisher.line()}"')
        + """
    print(read([{"first": {"rank": 3}, "second": {"rank": 4}}]), flush=True)
    (board,) = find_boards()
    print([read_board(board, key, 0, timeout_s=60) for key in ("second", "other")], flush=True)
    input()
    print(read([{"second": {"rank": 4}}]), flush=True)
    """,
        RAY_AUTH_MODE="disabled",
    )
    assert reader.line() == "[{'first': {'rank': 3}, 'second': {'rank': 4}}]"
    assert reader.line() == "[(1, {'rank': 4}), (0, None)]"
    publisher.process.stdin.write("\n")
    publisher.process.stdin.flush()
    assert publisher.line() == "withdrawn"
    out, _ = reader.finish()
    assert out.strip() == "[{'second': {'rank': 4}}]"
    out, _ = publisher.finish()
    assert out.strip() == "[]"


def test_agent_that_dies(local_ray, agent_pids, eventually):
    """What an agent has lost is published again by its owner, unasked, and what was withdrawn is not."""

    def read():
        return [board for board in read_boards(find_boards(), "", timeout_s=60).values() if isinstance(board, dict)]

    publish("first", 3, "kept")
    publish("second", 1, "withdrawn")
    assert await_published("first", timeout_s=60)
    assert read() == [{"first": "kept", "second": "withdrawn"}]
    (pid,) = agent_pids()
    os.kill(pid, signal.SIGKILL)
    withdraw("second")
    assert eventually(lambda: read() == [{"first": "kept"}])
    withdraw("first")
    assert not await_published("first", timeout_s=60)
    assert eventually(lambda: agent_pids() == [])


def test_withdrawn_before_there_is_an_agent(local_ray, agent_pids, eventually, monkeypatch):
    """An agent that is created for what was withdrawn since ends (seam: the creation of an agent)."""
    create, created = _agent._create_actor, []

    def withdraw_first(node_id):
        withdraw("early")
        created.append(node_id)
        return create(node_id)

    before = agent_pids()
    with monkeypatch.context() as patch:
        patch.setattr(_agent, "_create_actor", withdraw_first)
        publish("early", 1, "value")
    assert len(created) == 1
    assert eventually(lambda: agent_pids() == before)
