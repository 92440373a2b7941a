# SPDX-License-Identifier: Apache-2.0
"""Tests of links across hosts: workers that are killed and stopped."""

import importlib.util
import itertools
from pathlib import Path

import numpy as np
import pytest

from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_transfer import Link, LocalTensor
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, Restart, current_worker

TIMEOUT_S = 4.0
SHAPE = 64, 1 << 15


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
        self.fill(scale)

    def fill(self, scale):
        self.w[...] = scale * (np.arange(len(self.w)) + self.first + 1)[:, None]
        self.norm[...] = scale

    def weights(self):
        return {"w": LocalTensor(self.w, SHAPE, (self.first, 0)), "norm": self.norm}

    def holds(self):
        """Return the scale that all tensors have; None for a mixture."""
        scale = float(self.norm[0])
        expected = scale * (np.arange(len(self.w)) + self.first + 1)[:, None]
        return scale if (self.w == expected).all() and (self.norm == scale).all() else None


def make_groups(cluster):
    """Return a source of two ranks that hold half each, and a target of two replicas, each on a host of its own."""
    slots, options = cluster.slots(), {"restart": Restart(max_restarts=1000)}
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
def test_faults_across_hosts(hosts, how):
    """The source and the target are on hosts of their own; a rank of either is killed or stopped."""

    def driver(how, check_fault, cases):
        version = itertools.count(1)
        with RayVirtualCluster([1, 1, 1, 1], use_gpus=False) as cluster:
            source, target = make_groups(cluster)
            with (
                source,
                target,
                Link(source, target, source="weights", target="weights") as link,
            ):
                took = [check_fault(source, target, link, *case, how, version, TIMEOUT_S) for case in cases]
                assert set(link.explain().transports.values()) == {"tcp"}
        return took

    with hosts.driver(driver, how, faults.check_fault, faults.CASES * faults.REPEATS) as driving:
        took = driving.step(timeout_s=300 + 100 * faults.REPEATS)
        print(f"\n{len(took)} faults, {how}; reported after {min(took):.2f} to {max(took):.2f} s")  # noqa: T201
