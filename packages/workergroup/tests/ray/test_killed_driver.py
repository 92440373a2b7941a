# SPDX-License-Identifier: Apache-2.0
"""A driver is killed at random moments, and nothing of its groups is left: processes, actors, placement groups."""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable

import pytest
import ray
from ray.util.placement_group import placement_group_table

from fairlead_placement._ray_private import live_actors

from ..processes import find_trees_of_driver

pytestmark = pytest.mark.nightly

KILLS = int(os.environ.get("FAIRLEAD_KILLS", "20"))
WITHIN_S = 5.0
PHASES = ("start", "call", "resize", "restart", "shutdown")
DRIVER = """
    import os, signal, subprocess, sys, time
    import ray
    from fairlead_placement import RayVirtualCluster
    from fairlead_sharding import NamedSharding
    from fairlead_workergroup import RayWorkerGroup
    from fairlead_workergroup.testing import kill

    class Server:
        def __init__(self):
            for own_session in (False, True):
                subprocess.Popen(["bash", "-c", "sleep 281 & wait"], start_new_session=own_session)
            if not os.fork():  # it holds all files of the worker, and runs no other program
                if not os.fork():
                    os.setsid()
                    signal.pause()
                os._exit(0)
            os.wait()

        def serve(self):
            time.sleep(0.01)

    own = {"num_cpus": 3, "include_dashboard": False, "object_store_memory": 80_000_000}
    options = own if sys.argv[1] == "local" else {}
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error", **options)
    print("job", ray.get_runtime_context().get_job_id(), flush=True)
    with RayVirtualCluster([3], use_gpus=False) as cluster:
        axes = NamedSharding.from_shape(dp=2)
        while True:
            print("start", flush=True)
            with RayWorkerGroup(cluster, Server, [2], sharding_annotations=axes) as group:
                print("call", flush=True)
                for _ in range(50):
                    group.call("serve").result()
                print("resize", flush=True)
                group.resize(dp=3)
                group.resize(dp=1)
                print("restart", flush=True)
                kill(group, 0)
                group.restart_failed_workers()
                print("shutdown", flush=True)
"""


def kill_driver(number: int, address: str, token: str, find_left: Callable[[str], list[str]]) -> None:
    """Kill one driver, and wait until nothing of it is left.

    Args:
        number: which driver it is: the phases take turns.
        address: the Ray that the driver joins; "local" is one of its own.
        token: a part of the environment of all processes of that Ray.
        find_left: returns what is left of the driver whose job has this id.
    """
    phase, pause_s = PHASES[number % len(PHASES)], random.uniform(0, 1)
    # A short path, because Ray creates sockets in this folder.
    folder = tempfile.mkdtemp(prefix="fl-", dir="/tmp")
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER), address],
        env={**os.environ, "FAIRLEAD_TEST_TREES": token, "RAY_TMPDIR": folder},
        stdout=subprocess.PIPE,
        text=True,
    )
    job = ""
    try:
        assert driver.stdout is not None
        while (line := driver.stdout.readline().strip()) != phase:  # Ray prints lines of its own when a worker dies
            assert driver.poll() is None, f"the driver has ended with {driver.returncode}"
            job = line.removeprefix("job ") if line.startswith("job ") else job
        time.sleep(pause_s)
        # In a call the trees are certain to be there.
        assert phase != "call" or len(find_trees_of_driver(token)) >= 10
    finally:
        driver.kill()
        driver.wait()
    killed = time.monotonic()
    try:
        while left := find_left(job):
            took = time.monotonic() - killed
            assert took < WITHIN_S, f"{took:.1f} s after a kill {pause_s:.2f} s into {phase!r}: {left}"
            time.sleep(0.1)
        took = time.monotonic() - killed
        sys.stdout.write(f"driver {number}, killed {pause_s:.2f} s into {phase!r}: gone after {took:.1f} s\n")
    finally:
        for line in find_trees_of_driver(token):
            os.kill(int(line.split()[0]), signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(120 + 30 * KILLS)
def test_own_ray():
    """No process is left of the workers' trees of a driver that has started its own Ray."""
    for number in range(KILLS // 2):
        token = uuid.uuid4().hex
        kill_driver(number, "local", token, lambda job, token=token: find_trees_of_driver(token))


@pytest.mark.timeout(120 + 30 * KILLS)
def test_ray_of_others(raylets, monkeypatch):
    """No process, actor or placement group is left of a driver that has joined a Ray, which goes on."""
    token = uuid.uuid4().hex
    monkeypatch.setenv("FAIRLEAD_TEST_TREES", token)

    def find_left(job: str) -> list[str]:
        groups = {key: row for key, row in placement_group_table().items() if row["state"] != "REMOVED"}
        return [
            *find_trees_of_driver(token),
            *(f"actor {actor.actor_id} {actor.class_name}" for actor in live_actors() if actor.job_id == job),
            *(f"placement group {key} {row['name']}" for key, row in groups.items() if key.endswith(job)),
        ]

    with raylets({"num_cpus": 3}, logging_level="error", log_to_driver=False):
        address = ray.get_runtime_context().gcs_address
        for number in range(KILLS - KILLS // 2):
            kill_driver(number, address, token, find_left)
