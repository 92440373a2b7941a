# SPDX-License-Identifier: Apache-2.0
"""`launch` starts a group with one call, and removes everything that it has made."""

import os

import pytest
import ray
from ray.util.placement_group import placement_group_table

from fairlead_placement import ResourceInsufficientError
from fairlead_workergroup import RayWorkerBuilder, Restart, Shard, WorkerStartError, launch
from fairlead_workergroup.testing import kill


class Policy:
    """A worker that knows what it was made with."""

    def __init__(self, *args, fail=False, **kwargs):
        if fail:
            raise OSError("no checkpoint")
        self.made_with = (args, kwargs)

    def read(self):
        return self.made_with, ray.get_runtime_context().get_assigned_resources()["CPU"], os.environ.get("COLOR")

    def double(self, values):
        return [2 * value for value in values]


def held_groups() -> list[str]:
    """Return the placement groups that exist."""
    return [name for name, group in placement_group_table().items() if group["state"] != "REMOVED"]


def test_own_ray(monkeypatch):
    """Without a cluster it starts a Ray that has a CPU for each worker, and stops it after an error too."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    count = (os.cpu_count() or 1) + 2
    with pytest.raises(AttributeError), launch(Policy, workers=count) as policy:
        policy.call("read").of_the_user()
    assert not ray.is_initialized()


def test_second_group_on_own_ray(monkeypatch):
    """Beside the group that has started Ray, others run if there is room; else they are refused without a wait."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    with launch(Policy, workers=2) as first, launch(Policy, workers=1, name_prefix="other") as second:
        with pytest.raises(ResourceInsufficientError, match=r"this Ray, with 3 CPU\. Its group holds 2") as caught:
            launch(Policy, workers=2)
        assert "Call init_ray(num_cpus=...) before the first launch" in str(caught.value)
        assert "placement group other-0" in str(caught.value)
        assert len(first.call("read").result(60) + second.call("read").result(60)) == 3
    assert not ray.is_initialized()


@pytest.mark.usefixtures("local_ray")
class TestOnRunningRay:
    """On a Ray that this process is connected to, which stays."""

    def test_group(self):
        """The group has the axes, the arguments and the CPUs that were given, and its reservation goes with it."""
        options = {"init_args": ["a"], "init_kwargs": {"size": 3}, "cpus_per_worker": 2, "env_vars": {"COLOR": "red"}}
        with launch(Policy, dp=2, tp=2, **options) as policy:
            assert policy.sharding_annotations.shape == {"dp": 2, "tp": 2}
            assert policy.call("double", Shard([[1], [2, 3]], "dp"), collect="dp").result(60) == [[2], [4, 6]]
            assert policy.call("read").result(60) == [((("a",), {"size": 3}), 2.0, "red")] * 4
            assert len(held_groups()) == 1
        assert held_groups() == []
        assert ray.is_initialized()

    def test_builder_and_options_of_the_group(self):
        """A builder brings its arguments; the restart policy and the names of the workers are those of the group."""
        builder = RayWorkerBuilder(Policy, "a", size=3)
        with launch(builder, workers=1, restart=Restart(on_failure=True), name_prefix="mine") as policy:
            assert [worker["name"] for worker in policy.worker_metadata] == ["mine-0-0"]
            kill(policy, 0)
            assert policy.call("read", retries=1).result(60)[0][0] == (("a",), {"size": 3})

    def test_shutdown(self):
        """Without a `with`, `shutdown` does the same; a second one does nothing."""
        policy = launch(Policy, workers=2)
        assert policy.sharding_annotations.names == ["worker"]
        assert policy.shutdown()
        assert policy.shutdown()
        assert held_groups() == []

    def test_no_room(self):
        """More workers than CPUs are refused with a table of what the nodes have."""
        with pytest.raises(ResourceInsufficientError, match="cannot hold 17 bundles") as caught:
            launch(Policy, workers=17)
        (note,) = caught.value.__notes__
        assert "launch requested 17 worker(s) (worker=17) with cpus_per_worker=1 each" in note
        assert "make a RayVirtualCluster" in note
        assert held_groups() == []

    def test_failed_constructor(self):
        """A constructor that raises is reported with its rank, and nothing is left."""
        with pytest.raises(WorkerStartError, match="no checkpoint"):
            launch(Policy, workers=2, init_kwargs={"fail": True})
        assert held_groups() == []
