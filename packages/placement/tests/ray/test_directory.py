# SPDX-License-Identifier: Apache-2.0
"""Tests of what one job publishes at node agents and another job reads."""

import pytest


def test_published(start_script):
    """What a process publishes at an agent is read from another job, and goes when it is withdrawn or the job ends."""
    publisher = start_script(
        """
        import ray
        from fairlead_placement import init_ray
        from fairlead_placement.extension import publish, withdraw
        init_ray(address="local", num_cpus=1)
        node_id = ray.get_runtime_context().get_node_id()
        publish("first", 1, {node_id: {"rank": 3}})
        publish("second", 1, {node_id: {"rank": 4}})
        print(ray.get_runtime_context().gcs_address, flush=True)
        input()
        withdraw("first", [node_id])
        print("withdrawn", flush=True)
        input()
        """,
        RAY_AUTH_MODE="disabled",
    )
    reader = start_script(
        f"""
        import os, time
        from fairlead_placement import init_ray
        from fairlead_placement.extension import find_agents, read_boards, run_on_agents
        init_ray(address="{publisher.line()}")

        def read(wanted):
            deadline = time.monotonic() + 100
            while time.monotonic() < deadline:
                boards = [board for board in read_boards(find_agents(), timeout_s=60).values() if board]
                if sorted(key for board in boards for key in board) == wanted:
                    return boards
                time.sleep(0.05)
            return boards

        print(read(["first", "second"]), flush=True)
        pids = run_on_agents(os.getpid, dict.fromkeys(find_agents(), ()), timeout_s=60)
        print(set(map(type, pids.values())), flush=True)
        input()
        print(read(["second"]), flush=True)
        """,
        RAY_AUTH_MODE="disabled",
    )
    assert reader.line() == "[{'first': {'rank': 3}, 'second': {'rank': 4}}]"
    assert reader.line() == "{<class 'int'>}"
    publisher.process.stdin.write("\n")
    publisher.process.stdin.flush()
    assert publisher.line() == "withdrawn"
    out, _ = reader.finish()
    assert out.strip() == "[{'second': {'rank': 4}}]"


@pytest.mark.nightly
def test_agent_that_dies(start_script):
    """What an agent has lost is published again at the agent that takes its place, within seconds and unasked."""
    script = start_script(
        """
        import time
        import ray
        from fairlead_placement import init_ray
        from fairlead_placement.extension import find_agents, publish, read_boards, read_newer, withdraw
        init_ray(address="local", num_cpus=1)
        node_id = ray.get_runtime_context().get_node_id()
        publish("first", 3, {node_id: "kept"})
        publish("second", 1, {node_id: "withdrawn"})

        def read():
            return [board for board in read_boards(find_agents(), timeout_s=60).values() if isinstance(board, dict)]

        def wait_for(board):
            deadline = time.monotonic() + 100
            while (boards := read()) != [board] and time.monotonic() < deadline:
                time.sleep(0.1)
            print(boards, flush=True)

        wait_for({"first": "kept", "second": "withdrawn"})
        (agent,) = find_agents()
        ray.kill(agent.handle)
        withdraw("second", [node_id])
        wait_for({"first": "kept"})
        (agent,) = [one for one in find_agents() if not isinstance(read_boards([one], timeout_s=60)[one], Exception)]
        print(read_newer(agent, "first", 2, timeout_s=60), read_newer(agent, "first", 3, timeout_s=60), flush=True)
        withdraw("first", [node_id])
        """
    )
    assert script.line() == "[{'first': 'kept', 'second': 'withdrawn'}]"
    assert script.line() == "[{'first': 'kept'}]"
    assert script.line() == "(3, 'kept') (3, None)"
    script.finish()
