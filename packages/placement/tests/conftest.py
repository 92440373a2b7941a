# SPDX-License-Identifier: Apache-2.0
"""Fixtures that the tests share: scripts in their own processes, and ports."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap
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


# Ray requires these fields of an autoscaler's configuration.
EMPTY = (
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "initialization_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
    "cluster_synced_files",
    "rsync_exclude",
    "rsync_filter",
)


@pytest.fixture(scope="session")
def run_autoscaler(tmp_path_factory):
    """Return a context manager that runs Ray's autoscaler (version 2), which may add up to two nodes of 6 CPUs.

    It takes the address of the cluster, the id of its head in the provider, the source of the
    provider's class, and when a node counts as idle. It yields the folder of its output.
    """
    from ray._private import services

    @contextlib.contextmanager
    def run(address, head, provider, *, idle_minutes):
        folder = tmp_path_factory.mktemp("autoscaler")
        (folder / "provider_of_tests.py").write_text(provider)
        config = {
            **{key: [] for key in EMPTY},
            "auth": {},
            "file_mounts": {},
            "file_mounts_sync_continuously": False,
            "upscaling_speed": 1.0,
            "idle_timeout_minutes": idle_minutes,
            "cluster_name": "test",
            "max_workers": 2,
            "provider": {
                "type": "external",
                "module": "provider_of_tests.Provider",
                "gcs_address": address,
                "head_node_id": head,
                "use_node_id_as_ip": True,
                "disable_node_updaters": True,
            },
            "head_node_type": "ray.head.default",
            "available_node_types": {
                "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                "large": {"resources": {"CPU": 6}, "node_config": {}, "min_workers": 0, "max_workers": 2},
            },
        }
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_FAKE_CLUSTER", "1")
            patch.setenv("AUTOSCALER_UPDATE_INTERVAL_S", "1")
            patch.setenv("PYTHONPATH", str(folder), prepend=":")
            process = services.start_monitor(
                address,
                str(folder),
                stdout_filepath=str(folder / "out"),
                stderr_filepath=str(folder / "err"),
                autoscaling_config=str(folder / "config.json"),
                autoscaler_v2=True,
            ).process
        try:
            yield folder
        finally:
            process.kill()
            process.wait()

    return run


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
