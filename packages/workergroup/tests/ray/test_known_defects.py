# SPDX-License-Identifier: Apache-2.0
"""Defects that the group once had: waits that outlived their deadlines, and restarts that looked like losses."""

import contextlib
import os
import threading
import time

import pytest

from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_workergroup import RayWorkerGroup, StaleGroupError, WorkerFailureError

pytestmark = pytest.mark.nightly


class Worker:
    def rank(self, value=None):
        return int(os.environ["RANK"])


@pytest.fixture
def group(local_ray):
    with (
        RayVirtualCluster([4], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker, [2], sharding_annotations=NamedSharding.from_shape(dp=2)) as made,
    ):
        yield made


def test_deadline_of_a_resize_with_a_stopped_agent(group, agent_pids, stop_process):
    """`resize(timeout=...)` returns by its deadline, also if the agent that leases the port does not answer."""
    (agent,) = agent_pids()
    with stop_process(agent):
        began = time.monotonic()
        with contextlib.suppress(Exception):
            group.resize(dp=3, timeout=5)
        assert time.monotonic() - began < 7


def test_handles_during_a_planned_restart(group):
    """A call of a handle while ranks move fails as one of another epoch: no worker is lost."""
    handle, errors, is_over = group.handle(), [], threading.Event()

    def run():
        while not is_over.is_set():
            try:
                handle.call("rank", timeout=60).result()
            except WorkerFailureError as error:
                errors.append(error)
            except StaleGroupError:
                continue

    caller = threading.Thread(target=run, daemon=True)
    caller.start()
    for _ in range(4):
        group.restart([0, 1], elsewhere=True)
    is_over.set()
    caller.join(90)
    assert errors == []
