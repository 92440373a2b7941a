# SPDX-License-Identifier: Apache-2.0
"""Workers whose memory passes the limit of their group are ended."""

import ctypes
import time

import numpy as np
import pytest

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import RayWorkerGroup, Restart, WorkerFailureError, WorkerStartError

from ..calling import MB


@pytest.mark.parametrize("limit", ["lots", 0, True, "8 apples"])
def test_bad_limits(make_group, limit):
    """Wrong limits are refused before anything starts."""
    with pytest.raises(ValueError, match="a memory limit is a positive number of bytes"):
        make_group(memory_limit=limit)


def test_limit(make_group):
    """A worker that passes the limit is ended, and the cause has both numbers; the limit holds after a restart too."""
    group = make_group(restart=Restart(on_failure=True), memory_limit="600MB")
    for incarnation in (1, 2):
        with pytest.raises(WorkerFailureError) as caught:
            group.at(dp=1).call("grow", 800_000_000).result()
        (failure,) = caught.value.failures
        assert (failure.rank, failure.kind) == (1, "out-of-memory")
        assert "memory_limit of 600,000,000 bytes" in failure.cause
        assert int(failure.cause.split(" held ")[1].split(" bytes")[0].replace(",", "")) > 600_000_000
        assert group.call("state").result()[1][1] == incarnation


@pytest.mark.nightly
def test_memory_that_counts(make_group):
    """Values of the object store that a worker maps do not count; the memory of its children does."""
    group = make_group(restart=Restart(on_failure=True), memory_limit="300MB")
    assert group.at(dp=1).call("sum_slowly", np.ones(50 * MB)).result() == [50 * MB]
    with pytest.raises(WorkerFailureError) as caught:
        group.at(dp=1).call("start_child", 400_000_000).result()
    (failure,) = caught.value.failures
    assert (failure.rank, failure.kind) == (1, "out-of-memory")


def test_native_code(make_group):
    """A worker that sits in native code and holds the GIL is ended too."""

    def grow_and_hang(worker):
        worker.block = b"x" * (400 * MB)
        ctypes.PyDLL(None).pause()

    group = make_group(memory_limit="300MB")
    with pytest.raises(WorkerFailureError) as caught:
        group.at(dp=1).call(grow_and_hang).result()
    (failure,) = caught.value.failures
    assert (failure.rank, failure.kind) == (1, "out-of-memory")
    assert "memory_limit of 300,000,000 bytes" in failure.cause


class Large:
    """Holds too much memory from the start."""

    def __init__(self):
        self.block = b"x" * (400 * MB)
        time.sleep(60)


def test_constructor(local_ray):
    """A worker that passes the limit in its constructor is ended, and the error of the start says so."""
    expected = r"out-of-memory: .* held [\d,]+ bytes .* memory_limit of 300,000,000"
    with RayVirtualCluster([1], use_gpus=False) as cluster, pytest.raises(WorkerStartError, match=expected):
        RayWorkerGroup(cluster, Large, memory_limit="300MB")
