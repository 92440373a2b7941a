# SPDX-License-Identifier: Apache-2.0
"""Tests of a worker group on the slots of a pool of pretend TPU slices."""

import os
from collections.abc import Iterator

import pytest
import ray

from fairlead_placement import ResourceInsufficientError
from fairlead_placement.testing import assert_no_leaks
from fairlead_sharding import NamedSharding
from fairlead_tpu_executor import SlicePool
from fairlead_tpu_executor.testing import PretendSlices
from fairlead_workergroup import RayWorkerGroup


class Worker:
    def where(self) -> tuple[int, str, str, str, str]:
        names = ("EXECUTOR_CALL_SLICE", "EXECUTOR_CALL_INDEX", "MEGASCALE_SLICE_ID")
        return int(os.environ["RANK"]), ray.get_runtime_context().get_node_id(), *(os.environ[name] for name in names)

    def tpus(self) -> float:
        return float(ray.get_runtime_context().get_assigned_resources()["TPU"])


@pytest.fixture(scope="module")
def slices(coordinator_port: str) -> Iterator[PretendSlices]:
    """Start two pretend slices of two hosts each."""
    with PretendSlices() as made:
        made.add_slice()
        made.add_slice()
        yield made


def test_group_on_slices(slices: PretendSlices) -> None:
    """Ranks are ordered by slice and TPU worker id. Each rank gets all TPUs of its host, and the host's variables."""
    with assert_no_leaks(), SlicePool("v4-16", 2) as pool:
        slots = pool.slots()
        assert [(slot.node_idx, slot.bundle_index) for slot in slots] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert [slot.node_id for slot in slots] == [
            slices.node_id(name, worker) for name in slices.names() for worker in (0, 1)
        ]
        axes = NamedSharding.from_shape(slice=2, host=2)
        with RayWorkerGroup(slots, Worker, sharding_annotations=axes) as group:
            found = group.get_all_worker_results(group.run_all_workers_single_data("where"))
            assert found == [
                (rank, slot.node_id, str(rank // 2), str(rank % 2), str(rank // 2)) for rank, slot in enumerate(slots)
            ]
            assert group.get_all_worker_results(group.run_all_workers_single_data("tpus")) == [4.0] * 4
            with pytest.raises(ResourceInsufficientError):
                pool.run(os.getpid)
        assert len(set(pool.run(os.getpid))) == 4


def test_group_grows_by_a_slice(slices: PretendSlices) -> None:
    """The slots of a pool are a source of slots for a group that grows by a whole slice."""
    with assert_no_leaks(), SlicePool("v4-16", 2) as pool:
        slots = pool.slots()
        axes = NamedSharding.from_shape(slice=1, host=2)
        with RayWorkerGroup(slots[:2], Worker, sharding_annotations=axes) as group:
            assert group.resize(slice=2, slots=slots[2:]) == 1
            expected = [(rank, slot.node_id, str(rank // 2), str(rank % 2)) for rank, slot in enumerate(slots)]
            assert [found[:4] for found in group.call("where").result()] == expected
            assert group.resize(slice=1) == 2
            assert [found[:4] for found in group.call("where").result()] == expected[:2]
