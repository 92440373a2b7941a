# SPDX-License-Identifier: Apache-2.0
"""The threads of a driver, with everything on that runs in the background."""

import asyncio
import contextlib
import gc
import threading
import time

import pytest

from fairlead_placement import RayVirtualCluster
from fairlead_placement.extension import read_holders
from fairlead_sharding import NamedSharding
from fairlead_workergroup import RayWorkerGroup, Restart, StaleGroupError, current_worker
from fairlead_workergroup.testing import kill

KINDS = {"fairlead-change", "fairlead-finalizers", "fairlead-io"}


class Policy:
    """A worker whose first rank fails at once, and the others later."""

    def step(self):
        return 1

    def fail(self):
        time.sleep(0.2 * current_worker().rank)
        raise ValueError("the step failed")


@pytest.fixture
def names(monkeypatch):
    """Collect the names of Fairlead's threads: those that they start with, and those that they take later."""
    seen = set()

    def note(thread, name):
        if name.startswith("fairlead") or "fairlead" in getattr(getattr(thread, "_target", None), "__module__", ""):
            seen.add(name)

    start, own = threading.Thread.start, threading.Thread.name

    def start_noted(thread):
        note(thread, thread.name)
        start(thread)

    def rename(thread, name):
        note(thread, name)
        own.fset(thread, name)

    monkeypatch.setattr(threading.Thread, "start", start_noted)
    monkeypatch.setattr(threading.Thread, "name", property(own.fget, rename))
    return seen


@pytest.mark.timeout(300)
def test_three_kinds(local_ray, names, eventually):
    """An elastic group has threads of three kinds, whatever it does."""
    with (
        RayVirtualCluster([4], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster,
            Policy,
            workers_per_node=[2],
            sharding_annotations=NamedSharding.from_shape(dp=2),
            restart=Restart(on_failure=True),
        ) as group,
    ):
        assert group.call("step").result() == [1, 1]
        kill(group, 1)
        assert eventually(lambda: group.get_worker_status()[1].state == "dead")
        assert group.call("step").result() == [1, 1]  # after a restart
        kill(group, 0)
        assert eventually(lambda: group.get_worker_status()[0].state == "dead")
        assert asyncio.run(call_step(group)) == [1, 1]  # after a restart that the event loop does not wait for
        with pytest.raises(ValueError, match="the step failed"):
            group.call("fail").result()
        group.resize(dp=3)
        handle = group.handle()
        assert eventually(lambda: step_of(handle) == [1, 1, 1])
        assert len(group.get_worker_status()) == 3
        running = [thread.name for thread in threading.enumerate() if thread.name.startswith("fairlead")]
    with pytest.warns(ResourceWarning, match="dropped without shutdown"):
        drop_a_cluster(eventually)
    assert names | {*running} == KINDS  # what an earlier test has started runs on


def step_of(handle):
    with contextlib.suppress(StaleGroupError):  # it has not seen the resize yet
        return handle.call("step").result()


async def call_step(group):
    return await group.call("step")


def drop_a_cluster(eventually):
    RayVirtualCluster([1], use_gpus=False).reserve()
    gc.collect()
    assert eventually(lambda: not read_holders())
