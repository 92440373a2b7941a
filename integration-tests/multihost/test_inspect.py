# SPDX-License-Identifier: Apache-2.0
"""Tests of the command lines over hosts: the doctor with injected faults, and a group that hangs."""

import ctypes
import json
import os
import re
import signal
import subprocess
import textwrap
import time
from pathlib import Path

import pytest

from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_workergroup import RayWorkerGroup, current_worker

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


@pytest.mark.nightly
def test_doctor(namespaces, shifted, small_memory):
    """The doctor names each host with a fault, and the fault, and finds none on healthy hosts."""
    # Ray declares a node dead that does not respond for three minutes: later than the doctor has looked.
    with Hosts(system_config={"health_check_timeout_ms": 60_000}) as hosts:
        hosts.start_host(num_cpus=0)
        plain = hosts.start_host()
        healthy = hosts.run("fairlead_placement", "doctor", "--expect", "2")
        assert (healthy.returncode, healthy.stderr) == (0, ""), healthy.stdout
        assert healthy.stdout.endswith("Nothing is wrong.\n")

        early = hosts.start_host(env={"PYTHONPATH": shifted})
        small = hosts.start_host(binds={"/dev/shm": small_memory})
        lost = hosts.start_host()
        hosts.kill(lost)
        silent = hosts.start_host()  # takes longer than Ray needs to notice the dead one
        hosts.block(plain, early)
        stopped = [pid for pid in processes(silent.space) if "raylet" in Path(f"/proc/{pid}/comm").read_text()]
        os.kill(stopped[0], signal.SIGSTOP)
        done = hosts.run("fairlead_placement", "doctor", "--expect", "6x2 CPU", "--timeout", "40", "--json")
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
        ("ports", plain.address),
        ("ports", early.address),
    }
    assert f"not alive: {lost.address} (dead)" in found["nodes", ""]
    # How exactly a clock is read depends on how long the answer takes.
    assert re.search(r"a clock that is (4\.[5-9]|5\.[0-5]) s ahead of the others", found["clocks", early.address])
    assert "32 MiB in /dev/shm" in found["shared memory", small.address]
    assert f"cannot connect to {early.address}:" in found["ports", plain.address]


class Trainer:
    """Waits for the others in `meet`, as in a collective; one rank never gets there."""

    def train(self, secret, late):
        if int(os.environ["RANK"]) == late:
            read, _ = os.pipe()
            ctypes.PyDLL(None).read(read, ctypes.create_string_buffer(1), 1)  # holds the GIL
        self.meet()

    def meet(self):
        with current_worker().waiting():
            time.sleep(600)


def hung_job():
    """A driver with a group over all hosts, of which rank 5 hangs."""
    with (
        RayVirtualCluster([4, 4], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster, Trainer, name_prefix="policy", sharding_annotations=NamedSharding.from_shape(dp=4, tp=2)
        ) as group,
    ):
        yield os.getpid()
        call = group.call("train", "secret-in-an-argument", 5)
        while any(one.method != "train" or one.since_progress_s < 1.1 for one in group.get_worker_status()):
            time.sleep(0.05)
        yield
        call.cancel(force=True)


def test_hung_over_hosts(namespaces, shifted, stop_process):
    """While the driver is stopped, `why` and `stacks` work over hosts whose clocks are seconds apart."""
    with Hosts() as hosts:
        hosts.start_host(num_cpus=0)
        for env in (None, {"PYTHONPATH": shifted}):
            hosts.start_host(num_cpus=4, env=env)
        with hosts.driver(hung_job) as driver:
            pid = driver.step()
            driver.step()
            with stop_process(pid):
                why = hosts.run("fairlead_inspect", "why", "--after", "1", "--json")
                stacks = hosts.run("fairlead_inspect", "stacks", "--group", "policy", "--json")
    for done, status in ((why, 1), (stacks, 0)):
        assert (done.returncode, done.stderr) == (status, "")
        assert "secret" not in done.stdout
    late, stopped = json.loads(why.stdout)["groups"][0]["findings"]
    assert (late["kind"], late["ranks"], late["coords"]) == ("late", [5], {"dp": 2, "tp": 1})
    assert stopped["kind"] == "driver"
    assert [one["ranks"] for one in json.loads(stacks.stdout)["stacks"]] == [[0, 1, 2, 3, 4, 6, 7], [5]]
