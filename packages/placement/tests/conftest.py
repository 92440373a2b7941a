# SPDX-License-Identifier: Apache-2.0
"""Fixtures that the tests share: scripts in their own processes, and ports."""

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest


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
        out, err = self.process.communicate(input="\n", timeout=170)
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
def pauses(monkeypatch):
    """Return a list of the pauses of the reservations that wait, in seconds: it is empty until one waits."""
    made = []

    def sleep(seconds):
        made.append(seconds)
        time.sleep(seconds)

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr("fairlead_placement._reserve.wait.time", clock)
    return made


@pytest.fixture
def patient(monkeypatch):
    """Let Ray take a minute to place a group, and two to start a process, even for a reservation that does not wait.

    However busy the machine is, what fits is then placed in the first attempt.
    """
    monkeypatch.setattr("fairlead_placement._reserve.groups.PLACING_S", 60.0)
    monkeypatch.setattr("fairlead_placement._reserve.slots.LEAST_S", 120.0)
    monkeypatch.setattr("fairlead_placement._reserve.gpus.LEAST_S", 120.0)


class Extension:
    """Calls `extend` on a thread of its own, and keeps what it returns or raises."""

    def __init__(self, cluster, *counts, **options):
        self.result = None
        self._thread = threading.Thread(target=self._run, args=(cluster, list(counts), options))
        self._thread.start()

    def _run(self, cluster, counts, options):
        try:
            self.result = cluster.extend(counts, **options)
        except Exception as error:  # noqa: BLE001  the test looks at it
            self.result = error

    def wait(self):
        self._thread.join()
        return self.result


@pytest.fixture
def start_extension():
    """Return a function that extends a cluster on a thread of its own."""
    return Extension


@pytest.fixture(scope="module")
def only_head(raylets):
    """Start a head without room, for all tests of a module."""
    with raylets({"num_cpus": 0}, quick_deaths=True, logging_level="error", log_to_driver=False) as cluster:
        yield cluster


@pytest.fixture
def joining(only_head, eventually):
    """Return a head without room. The nodes that a test adds are removed after it."""
    import ray

    yield only_head
    for node in list(only_head.worker_nodes):
        only_head.remove_node(node, allow_graceful=False)
    assert eventually(lambda: sum(row["Alive"] for row in ray.nodes()) == 1, 60)


@pytest.fixture
def nodes(joining):
    """Return a head without room with two nodes of 2 CPUs."""
    for _ in range(2):
        joining.add_node(num_cpus=2)
    return joining


@pytest.fixture(scope="session")
def hold_group():
    """Return a context manager that holds a placement group, as another user of the cluster does."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    from fairlead_placement._reserve.groups import are_shown

    @contextlib.contextmanager
    def hold(bundles, name="", **options):
        group = placement_group(bundles, name=name, **options)
        try:
            ray.get(group.ready())
            # Until the node reports the group, its resources look free.
            while not are_shown({group.id.hex()}):
                time.sleep(0.02)
            yield group
        finally:
            remove_placement_group(group)

    return hold


@pytest.fixture(scope="session")
def bind():
    """Return a function that binds a port and listens, as a server does."""

    def listen(port, *, reuse=False):
        with contextlib.closing(socket.socket()) as server:
            if reuse:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("", port))
            server.listen()

    return listen
