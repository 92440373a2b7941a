# SPDX-License-Identifier: Apache-2.0
"""Tests of the command lines over hosts: the doctor, with faults injected into the hosts."""

import json
import os
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest

from .hosts import Hosts
from .network import processes

# How far the clocks of a host are ahead.
AHEAD_S = 5.0


@pytest.fixture(scope="module")
def shifted(namespaces, tmp_path_factory):
    """A folder that makes each Python with it in its PYTHONPATH run with clocks that are ahead."""
    folder = tmp_path_factory.mktemp("shifted")
    (folder / "sitecustomize.py").write_text(
        textwrap.dedent(f"""
            import time
            def shift(clock):
                return lambda: clock() + {AHEAD_S}
            time.time, time.monotonic = shift(time.time), shift(time.monotonic)
        """)
    )
    return str(folder)


@pytest.fixture
def small_memory(tmp_path):
    """A file system in memory of 32 MiB."""
    folder = tmp_path / "shm"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", str(folder)], check=True)
    yield str(folder)
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_doctor(namespaces, shifted, small_memory, tmp_path):
    """The doctor names each host with a fault, and the fault, and finds none on healthy hosts."""
    with Hosts() as hosts:
        hosts.start_host(num_cpus=0)
        plain = hosts.start_host()
        healthy = hosts.run("fairlead_placement", "doctor", "--expect", "2")
        assert (healthy.returncode, healthy.stderr) == (0, ""), healthy.stdout
        assert healthy.stdout.endswith("Nothing is wrong.\n")

        early = hosts.start_host(env={"PYTHONPATH": shifted})
        small = hosts.start_host(binds={"/dev/shm": small_memory})
        apart = hosts.start_host(env={"UV_CACHE_DIR": "/dev/shm/uv", "FAIRLEAD_VENV_DIR": str(tmp_path)})
        lost = hosts.start_host()
        hosts.kill(lost)
        silent = hosts.start_host()  # takes longer than Ray needs to notice the dead one
        hosts.block(plain, early)
        # Ray declares a node dead that does not respond for 16 s.
        stopped = [pid for pid in processes(silent.space) if "raylet" in Path(f"/proc/{pid}/comm").read_text()]
        os.kill(stopped[0], signal.SIGSTOP)
        done = hosts.run("fairlead_placement", "doctor", "--expect", "7x2 CPU", "--timeout", "6", "--json")
    assert done.returncode == 1, done.stderr
    found = {
        (check["name"], fault["address"]): fault["what"]
        for check in json.loads(done.stdout)["checks"]
        for fault in check["faults"]
    }
    assert set(found) == {
        ("nodes", ""),
        ("agents", silent.address),
        ("accelerators", hosts.head.address),
        ("clocks", early.address),
        ("shared memory", small.address),
        ("uv cache", apart.address),
        ("ports", plain.address),
        ("ports", early.address),
    }
    assert f"not alive: {lost.address} (dead)" in found["nodes", ""]
    assert "a clock that is 5.0 s ahead of the others" in found["clocks", early.address]
    assert "32 MiB in /dev/shm" in found["shared memory", small.address]
    assert f"cannot connect to {early.address}:" in found["ports", plain.address]
