# SPDX-License-Identifier: Apache-2.0
"""Fixtures that the tests share: clusters of several raylets, scripts in their own processes, and waiting."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest
from hypothesis import settings

# No deadline, which would fail slow tests on a busy machine. No database, so that a test run leaves no files.
settings.register_profile("fairlead", max_examples=150, deadline=None, database=None)
settings.load_profile("fairlead")


# With these settings of its head Ray declares a node dead within about a second.
QUICK_DEATHS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 2,
    "health_check_timeout_ms": 500,
}


@contextlib.contextmanager
def several_raylets(head, workers=(), *, quick_deaths=False, **options):
    """Start a cluster of several raylets on this machine, and attach this process to it.

    Args:
        head: the resources of the head, as arguments of `Cluster.add_node`.
        workers: the resources of each further node, in the order in which the nodes start.
        quick_deaths: whether Ray declares a node dead within about a second.
        options: options of `ray.init`.
    """
    # Not at the top, because some tests of this folder check that nothing has imported Ray yet.
    import ray
    from ray.cluster_utils import Cluster

    settings = {"_system_config": QUICK_DEATHS} if quick_deaths else {}
    # The path must be short, because Ray puts sockets below it.
    folder = tempfile.mkdtemp(prefix="fl-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        made = Cluster(initialize_head=True, head_node_args={**head, **settings, "include_dashboard": False})
        try:
            for worker in workers:
                made.add_node(**worker)
            ray.init(address=made.address, **options)
            yield made
        finally:
            ray.shutdown()
            made.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def raylets():
    """Return a function that starts clusters of several raylets; see `several_raylets`."""
    return several_raylets


class Script:
    """A Python script in its own process. Its `input()` returns when `finish` is called."""

    def __init__(self, source, folder, env):
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", textwrap.dedent(source)],
            cwd=folder,
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self):
        """Return the next line that it prints; fail with its errors if it prints no more."""
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=60)[1]
        return line.strip()

    def finish(self, *, check=True):
        """Return the rest of (stdout, stderr)."""
        out, err = self.process.communicate(input="\n", timeout=120)
        assert not check or self.process.returncode == 0, err
        return out, err


@pytest.fixture(scope="session")
def script_class():
    """Return the class, for fixtures that live longer than a test."""
    return Script


@pytest.fixture
def start_script(tmp_path):
    """Return a function that starts scripts. Those that a test leaves running are killed."""
    started = []

    def start(source, **env):
        started.append(Script(source, tmp_path, env))
        return started[-1]

    yield start
    for script in started:
        script.process.kill()
        script.process.communicate()


@pytest.fixture
def run_script(start_script):
    """Return a function that runs a script to its end and returns its output."""
    return lambda source, **env: start_script(source, **env).finish()[0]


@pytest.fixture
def eventually():
    """Return a function that waits until a condition holds, or for some seconds, and returns whether it holds."""

    def wait(holds, timeout_s=15.0):
        deadline = time.monotonic() + timeout_s
        while not (held := holds()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return bool(held)

    return wait
