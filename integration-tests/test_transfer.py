# SPDX-License-Identifier: Apache-2.0
"""Tests of links over several nodes. The nodes are raylets that share one address."""

import numpy as np
import pytest

from fairlead_placement import RayVirtualCluster
from fairlead_transfer import Link, LocalTensor
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, current_worker

SHAPE = 8, 1000


class Rows:
    """Holds its rows of a tensor."""

    def __init__(self, parts: int) -> None:
        size = SHAPE[0] // parts
        self.first = current_worker().rank * size if parts > 1 else 0
        self.w = np.zeros((size, SHAPE[1]))

    def fill(self, step: float) -> None:
        self.w[...] = step + self.first + np.arange(len(self.w))[:, None]

    def weights(self) -> dict[str, LocalTensor]:
        return {"w": LocalTensor(self.w, SHAPE, (self.first, 0))}

    def rows(self) -> list[float]:
        assert (self.w == self.w[:, :1]).all()
        return self.w[:, 0].tolist()


@pytest.fixture
def two_nodes(raylets):
    """Start a head without CPUs, and two nodes with three CPUs each."""
    with raylets({"num_cpus": 0}, [{"num_cpus": 3}] * 2, logging_level="error", log_to_driver=False) as cluster:
        yield cluster


def test_link_over_two_nodes(two_nodes):
    """Ranks of one node share memory; what another node needs crosses to it once, however many of its ranks want it."""
    with RayVirtualCluster([3, 3], use_gpus=False) as cluster:
        slots = cluster.slots()
        assert slots[0].node_id == slots[2].node_id != slots[3].node_id
        with (
            RayWorkerGroup(slots[:2], RayWorkerBuilder(Rows, 2)) as source,
            RayWorkerGroup(slots[2:], RayWorkerBuilder(Rows, 1)) as target,
            Link(source, target, source="weights", target="weights") as link,
        ):
            for step in range(3):
                source.call("fill", step).result()
                report = link.send(step, timeout=60)
                assert target.call("rows").result() == [[step + row for row in range(8)]] * 4
            assert report.transports == {"shared_memory": 2, "tcp": 6}
            assert report.bytes_moved == 4 * 8 * 1000 * 8
            assert report.bytes_between_nodes == 8 * 1000 * 8
            assert "tcp" in str(link.explain())
