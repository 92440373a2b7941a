# SPDX-License-Identifier: Apache-2.0
"""Tests of what one job publishes at node agents and another job reads."""


def test_published(start_script):
    """What a process publishes at an agent is read from another job, and goes when it is withdrawn or the job ends."""
    publisher = start_script(
        """
        import ray
        from fairlead_placement import init_ray
        from fairlead_placement.spi import publish, withdraw
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
        from fairlead_placement.spi import find_agents, read_boards, run_on_agents
        init_ray(address="{publisher.line()}")

        def read(wanted):
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                boards = [board for board in read_boards(find_agents(), timeout_s=10).values() if board]
                if sorted(key for board in boards for key in board) == wanted:
                    return boards
                time.sleep(0.05)
            return boards

        print(read(["first", "second"]), flush=True)
        pids = run_on_agents(os.getpid, dict.fromkeys(find_agents(), ()), timeout_s=10)
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
