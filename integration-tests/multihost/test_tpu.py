# SPDX-License-Identifier: Apache-2.0
"""Tests of pretend TPU slices whose hosts have different addresses. Ray detects them like real slices."""

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fairlead_tpu_executor import SlicePool

from .hosts import Host, Hosts


def add_host(hosts: Hosts, name: str, worker: int, *, kind: str = "v4-16") -> Host:
    env = {
        "TPU_NAME": name,
        "TPU_WORKER_ID": str(worker),
        "TPU_ACCELERATOR_TYPE": kind,
        "TPU_TOPOLOGY": "2x2x2",
        "MEGASCALE_SLICE_ID": "stale",
    }
    return hosts.start_host(resources={"TPU": 4}, env=env)


@pytest.fixture(scope="module")
def tpu_hosts(namespaces: None) -> Iterator[tuple[Hosts, dict[str, list[Host]]]]:
    """Start a head, and slices `first` and `second` of two hosts each. In each slice, worker 1 starts first."""
    with Hosts() as made:
        made.start_host(num_cpus=0)
        slices = {}
        for name in ("first", "second"):
            slices[name] = [add_host(made, name, worker) for worker in (1, 0)][::-1]
        yield made, slices


def own_address(towards):
    """Return the source address of this process's connections, which may differ from the address that Ray reports."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing
        return probe.getsockname()[0]


def greet():
    """Listen at the coordinator's address on worker 0, as `jax.distributed` does, and connect to it elsewhere."""
    host, _, port = os.environ["EXECUTOR_COORDINATOR_ADDRESS"].partition(":")
    me = own_address(host)
    if os.environ["EXECUTOR_CALL_INDEX"] == "0":
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((host, int(port)))
            server.listen()
            server.settimeout(120)
            for _ in range(int(os.environ["EXECUTOR_NUM_HOSTS"]) - 1):
                connection, _ = server.accept()
                with connection:
                    connection.sendall(os.environ["TPU_NAME"].encode())
        return me, "listened"
    for _ in range(1200):
        try:
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                return me, connection.recv(100).decode()
        except ConnectionRefusedError:
            time.sleep(0.1)
    raise TimeoutError(f"no process listens at {host}:{port}")


def test_slices_of_hosts(tpu_hosts):
    """Results are in the order of the TPU worker ids, and the hosts of each slice connect to its worker 0."""
    hosts, slices = tpu_hosts

    def driver():
        def megascale():
            names = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_SLICE_ID")
            return tuple(os.environ.get(name) for name in names)

        with SlicePool("v4-16", 2) as pool:
            return pool.run(greet), pool.run(megascale), [one.ip_address for one in pool.slices]

    greetings, megascale, firsts = hosts.drive(driver)
    assert greetings == [
        (host.address, "listened" if worker == 0 else name)
        for name in ("first", "second")
        for worker, host in enumerate(slices[name])
    ]
    assert firsts == [slices[name][0].address for name in ("first", "second")]
    assert megascale == [(f"{firsts[0]}:8081", slice_id) for slice_id in "0011"]


@pytest.mark.nightly
def test_host_is_killed(tpu_hosts):
    """If a host dies during a run, the pool cancels the other host's task, and the run succeeds on a new slice."""
    hosts, _ = tpu_hosts

    def driver():
        def work(folder):
            Path(folder, f"{os.environ['TPU_NAME']}.{os.environ['TPU_HOST_ID']}").write_text(str(os.getpid()))
            while os.environ["TPU_NAME"] == "lost":
                time.sleep(0.1)
            return os.environ["TPU_NAME"]

        yield
        with (
            tempfile.TemporaryDirectory() as folder,
            SlicePool("v5p-16", max_retries_failure=0, max_retries_preemption=1) as pool,
            ThreadPoolExecutor() as threads,
        ):
            running = threads.submit(pool.run, work, folder)
            while len(os.listdir(folder)) < 2:
                time.sleep(0.1)
            yield
            results = running.result(240)
            pids = [Path(folder, f"lost.{worker}").read_text() for worker in (0, 1)]
            # Their locks and sockets are gone, or go with the host. A raylet reaps a process a moment later.
            deadline = time.monotonic() + 60
            while (left := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]) and time.monotonic() < deadline:
                time.sleep(0.1)
            yield results, left
        yield

    # The driver compares the cluster at its end with its start, so the hosts that join in between must be gone by then.
    with hosts.driver(driver) as driving:
        driving.step()
        lost = [add_host(hosts, "lost", worker, kind="v5p-16") for worker in (1, 0)]
        driving.step()
        hosts.kill(lost[0])
        new = [add_host(hosts, "new", worker, kind="v5p-16") for worker in (1, 0)]
        assert driving.step() == (["new", "new"], [])
        driving.step()
        for host in (lost[1], *new):
            hosts.kill(host)
