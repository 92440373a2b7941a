# SPDX-License-Identifier: Apache-2.0
"""What the tests share: scripts in processes of their own, and waiting."""

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

# No deadline: on a busy machine it would fail tests for being slow. No database: a test run leaves no files.
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
    """A cluster of several raylets on this machine, with this process attached to it.

    Args:
        head: the resources of the head, as arguments of `Cluster.add_node`.
        workers: the resources of each further node, in the order in which the nodes start.
        quick_deaths: whether Ray is to declare a node dead at once.
        options: how to attach, as arguments of `ray.init`.
    """
    # Not at the top: some tests of this folder run where Ray must not be imported before them.
    import ray
    from ray.cluster_utils import Cluster

    settings = {"_system_config": QUICK_DEATHS} if quick_deaths else {}
    # Ray puts sockets below it: short.
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
    """Makes clusters of several raylets; see `several_raylets`."""
    return several_raylets


class Script:
    """A Python script in a process of its own. It goes on past `input()` when `finish` is called."""

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
        """The next line it prints, or its errors if it prints no more."""
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=60)[1]
        return line.strip()

    def finish(self, *, check=True):
        """(stdout, stderr) of what is left."""
        out, err = self.process.communicate(input="\n", timeout=120)
        assert not check or self.process.returncode == 0, err
        return out, err


@pytest.fixture(scope="session")
def script_class():
    """For fixtures that live longer than a test."""
    return Script


@pytest.fixture
def start_script(tmp_path):
    """Starts scripts, and ends those that a test leaves running."""
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
    """Runs a script to its end and gives its output."""
    return lambda source, **env: start_script(source, **env).finish()[0]


@pytest.fixture
def eventually():
    """Waits until something holds, at most some seconds; says whether it came to hold."""

    def wait(holds, timeout_s=15.0):
        deadline = time.monotonic() + timeout_s
        while not (held := holds()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return bool(held)

    return wait
