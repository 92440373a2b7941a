# SPDX-License-Identifier: Apache-2.0
"""Tests of links across hosts: workers that are killed and stopped, and reads by NIXL over TCP."""

import importlib.util
import itertools
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_transfer import Link, LocalTensor, TransferError
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, Restart, current_worker

TIMEOUT_S = 4.0
SHAPE = 64, 1 << 15
# Namespaces are on one machine, of which UCX would make use.
OVER_TCP = {"UCX_TLS": "tcp"}

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="nixl-cu12 is not installed")


def load_faults():
    """Load what the tests on one host check too; its functions are pickled by value."""
    path = Path(__file__).parents[2] / "packages/transfer/tests/faults.py"
    spec = importlib.util.spec_from_file_location("faults_of_transfers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


faults = load_faults()
pytestmark = [pytest.mark.nightly] if faults.REPEATS > 1 else []


class Holder:
    """Holds rows of a tensor, and a small one."""

    def __init__(self, scale=0.0):
        me = current_worker()
        parts = me.sharding.shape.get("tp", 1)
        self.w = np.empty((SHAPE[0] // parts, SHAPE[1]), "float32")
        self.first = len(self.w) * me.rank if parts > 1 else 0
        self.norm = np.empty(5)
        self.gate = None
        self.fill(scale)

    def fill(self, scale):
        self.w[...] = scale * (np.arange(len(self.w)) + self.first + 1)[:, None]
        self.norm[...] = scale

    def move(self):
        """Put the tensors into other memory, and give the old memory back."""
        self.w, self.norm = self.w.copy(), self.norm.copy()

    def weights(self):
        if self.gate is not None:
            # Tell the test that all requests to the sources are on their way, and wait.
            gate, self.gate = Path(self.gate), None
            Path(f"{gate}-{current_worker().rank}").touch()
            deadline = time.monotonic() + 240
            while not gate.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
        return {"w": LocalTensor(self.w, SHAPE, (self.first, 0)), "norm": self.norm}

    def close_gate(self, path):
        self.gate = path

    def pid(self):
        return os.getpid()

    def holds(self):
        """Return the scale that all tensors have; None for a mixture."""
        scale = float(self.norm[0])
        expected = scale * (np.arange(len(self.w)) + self.first + 1)[:, None]
        return scale if (self.w == expected).all() and (self.norm == scale).all() else None

    def writing(self):
        """Return how many late transfers may still write in this process."""
        import sys

        late = sys.modules["_fairlead_transfer"].__dict__.get("late", [])
        return sum(agent.is_writing(inbox.handles) for agent, inbox in late)


def make_groups(cluster):
    """Return a source of two ranks that hold half each, and a target of two replicas, each on a host of its own."""
    slots, options = cluster.slots(), {"env_vars": OVER_TCP, "restart": Restart(max_restarts=1000)}
    return (
        RayWorkerGroup(
            slots[:2], RayWorkerBuilder(Holder, 1.0), sharding_annotations=NamedSharding.from_shape(tp=2), **options
        ),
        RayWorkerGroup(
            slots[2:], RayWorkerBuilder(Holder), sharding_annotations=NamedSharding.from_shape(replica=2), **options
        ),
    )


@pytest.mark.timeout(400 + 100 * faults.REPEATS)
@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("transport", ["object_store", pytest.param("nixl", marks=[needs_nixl, pytest.mark.nightly])])
def test_faults_across_hosts(hosts, transport, how):
    """The source and the target are on hosts of their own; a rank of either is killed or stopped."""

    def driver(transport, how, check_fault, cases):
        version = itertools.count(1)
        with RayVirtualCluster([1, 1, 1, 1], use_gpus=False) as cluster:
            source, target = make_groups(cluster)
            with (
                source,
                target,
                Link(source, target, source="weights", target="weights", transport=transport, verify="always") as link,
            ):
                took = [check_fault(source, target, link, *case, how, version, TIMEOUT_S) for case in cases]
                assert set(link.explain().transports.values()) == {transport}
        return took

    with hosts.driver(driver, transport, how, faults.check_fault, faults.CASES * faults.REPEATS) as driving:
        took = driving.step(timeout_s=300 + 100 * faults.REPEATS)
        print(f"\n{len(took)} faults by {transport}, {how}; reported after {min(took):.2f} to {max(took):.2f} s")  # noqa: T201


@pytest.mark.nightly
@needs_nixl
@pytest.mark.parametrize("number", range(faults.REPEATS))
@pytest.mark.parametrize("commit", ["staged", "in_place"])
def test_nixl_and_a_stopped_source(hosts, tmp_path, commit, number):
    """A read from a stopped source is late; when it goes on later, it does not touch what targets hold by then."""

    def driver(commit, folder):
        with RayVirtualCluster([1, 1, 1, 1], use_gpus=False) as cluster:
            source, target = make_groups(cluster)
            with source, target, Link(source, target, source="weights", target="weights", commit=commit) as link:
                link.send(0, timeout=240)
                assert target.call("holds").result() == [1.0, 1.0]
                assert set(link.explain().transports.values()) == {"nixl"}
                assert "have NIXL" in str(link.explain()) or commit == "in_place"
                gate = f"{folder}/gate"
                source.call("fill", 2.0).result()
                target.call("close_gate", gate).result()
                stopped = source.call("pid").result()[1]
                failed = []

                def send():
                    try:
                        link.send(1, timeout=8)
                    except TransferError as error:
                        failed.append(error)

                thread = threading.Thread(target=send)
                thread.start()
                wait_for(lambda: Path(f"{gate}-0").exists() and Path(f"{gate}-1").exists())
                source.call("pid").result()  # after it, the sources have staged
                os.kill(stopped, signal.SIGSTOP)
                try:
                    wait_for(lambda: Path(f"/proc/{stopped}/stat").read_text().rpartition(")")[2].split()[0] == "T")
                    Path(gate).touch()
                    thread.join()
                    (error,) = failed
                    check = check_staged if commit == "staged" else check_in_place
                    check(link, target, error)
                    source.workers[1].move.remote()  # it runs before the late reads are answered
                finally:
                    os.kill(stopped, signal.SIGCONT)
                before = target.call("holds").result()
                wait_for(lambda: target.call("writing").result() == [0, 0])
                if commit == "staged":
                    assert target.call("holds").result() == before == [1.0, 1.0]
                source.call("fill", 3.0).result()
                link.send(2, timeout=240)
                assert target.call("holds").result() == [3.0, 3.0]
        return str(error)

    def check_staged(link, target, error):
        assert error.phase == "move"
        assert [(one.side, one.rank) for one in error.failures] == [("source", 1)]
        assert target.call("writing").result() == [1, 1]
        assert link.versions() == {0: 0, 1: 0}
        target.workers[1].fill.remote(7.0)
        link.sync([1], timeout=240)  # from the other target rank
        assert link.versions() == {0: 0, 1: 0}
        assert target.call("holds").result() == [1.0, 1.0]

    def check_in_place(link, target, error):
        assert error.phase == "commit"
        assert link.versions() == {0: "torn", 1: "torn"}
        # The first is refused while the stopped source has yet to answer the reads of the last one.
        for again in (lambda: link.send(2, timeout=20), link.sync):
            with pytest.raises(TransferError, match=r"may still write into its tensors(.|\n)*restart_failed_workers"):
                again()

    def wait_for(condition):
        deadline = time.monotonic() + 240
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    with hosts.driver(driver, commit, str(tmp_path)) as driving:
        print(f"\n{driving.step()}")  # noqa: T201
