# SPDX-License-Identifier: Apache-2.0
"""Workers whose memory passes the limit of their group are ended."""

import os
import signal

import numpy as np
import pytest

from fairlead_workergroup import Restart, WorkerFailureError

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


def test_memory_that_counts(make_group):
    """Values of the object store that a worker maps do not count; the memory of its children does."""
    group = make_group(restart=Restart(on_failure=True), memory_limit="300MB")
    assert group.at(dp=1).call("sum_slowly", np.ones(50 * MB)).result() == [50 * MB]
    with pytest.raises(WorkerFailureError) as caught:
        group.at(dp=1).call("start_child", 400_000_000).result()
    (failure,) = caught.value.failures
    assert (failure.rank, failure.kind) == (1, "out-of-memory")


@pytest.mark.nightly
def test_an_agent_that_dies(make_group, agent_pids, eventually):
    """The agent that takes the place of one that has died enforces the limit too."""
    group = make_group(memory_limit="300MB")
    dead = agent_pids()
    for pid in dead:
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: (present := agent_pids()) and not set(dead) & set(present))
    with pytest.raises(WorkerFailureError) as caught:
        group.at(dp=1).call("grow", 400_000_000).result()
    (failure,) = caught.value.failures
    assert (failure.rank, failure.kind) == (1, "out-of-memory")
