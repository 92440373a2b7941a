# SPDX-License-Identifier: Apache-2.0
"""A driver that has started its own Ray is killed at random moments, and nothing of its workers' trees is left."""

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
from concurrent.futures import ThreadPoolExecutor

import pytest

from ..processes import find_trees_of_driver

pytestmark = pytest.mark.nightly

# `nox -s nightly` kills more drivers, on a machine that does nothing else.
KILLS = int(os.environ.get("FAIRLEAD_KILLS", "2"))
WITHIN_S = 15.0 if "FAIRLEAD_KILLS" in os.environ else 60.0
AT_A_TIME = 2
PHASES = ("start", "call", "restart", "shutdown")
DRIVER = """
    import os, signal, subprocess, time
    import ray
    from fairlead_placement import RayVirtualCluster
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

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error",
             object_store_memory=80_000_000)
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        while True:
            print("start", flush=True)
            with RayWorkerGroup(cluster, Server) as group:
                print("call", flush=True)
                for _ in range(50):
                    group.call("serve").result()
                print("restart", flush=True)
                kill(group, 1)
                group.restart_failed_workers()
                print("shutdown", flush=True)
"""


def kill_driver(number: int) -> float:
    """Kill one driver, and return for how many seconds its workers and their trees have outlived it."""
    token, chance = uuid.uuid4().hex, random.Random()
    # At first in a call, when the trees are certain to be there.
    phase, pause_s = (chance.choice(PHASES), chance.uniform(0, 1)) if number else ("call", 0.0)
    # A short path, because Ray creates sockets in this folder.
    folder = tempfile.mkdtemp(prefix="fl-", dir="/tmp")
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER)],
        env={**os.environ, "FAIRLEAD_TEST_TREES": token, "RAY_TMPDIR": folder},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert driver.stdout is not None
        while (line := driver.stdout.readline()) != f"{phase}\n":  # Ray prints lines of its own when a worker dies
            assert line, f"the driver has ended with {driver.wait(60)}"
        time.sleep(pause_s)
        assert number or len(find_trees_of_driver(token)) >= 10
    finally:
        driver.kill()
        driver.wait()
    killed = time.monotonic()
    try:
        while left := find_trees_of_driver(token):
            took = time.monotonic() - killed
            assert took < WITHIN_S, f"{took:.1f} s after a kill {pause_s:.2f} s into {phase!r}: {left}"
            time.sleep(0.1)
        return time.monotonic() - killed
    finally:
        for line in find_trees_of_driver(token):
            os.kill(int(line.split()[0]), signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def test_killed_driver():
    """A driver that gets SIGKILL while it starts, calls, restarts or ends workers leaves no process of their trees."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        took = list(pool.map(kill_driver, range(KILLS)))
    if KILLS > 2:
        sys.stdout.write(f"{KILLS} drivers; the last process ended {max(took):.1f} s after its driver\n")
