# SPDX-License-Identifier: Apache-2.0
"""Clusters and groups that tests share."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from fairlead_workergroup import RayWorkerGroup

# No deadline and no health check of speed: on a busy machine they would fail tests for being slow. No database: a test
# run leaves no files.
settings.register_profile(
    "fairlead-workergroup",
    max_examples=int(os.environ.get("FAIRLEAD_EXAMPLES", "100")),
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fairlead-workergroup")


@pytest.fixture(scope="module")
def cluster(local_ray: None) -> Iterator[object]:
    """Yield one logical node with eight CPU slots."""
    from fairlead_placement import RayVirtualCluster

    with RayVirtualCluster([8], use_gpus=False) as reserved:
        yield reserved


@pytest.fixture(scope="module")
def shared(local_ray: None, request: pytest.FixtureRequest, shared_group: Any) -> "RayWorkerGroup":
    """Return one group for the tests of a module that leave it unchanged; `SHARED` is its class and its axes.

    If the next module shares a group of the same class and axes, it gets this one.
    """
    from fairlead_placement import RayVirtualCluster
    from fairlead_workergroup import RayWorkerGroup

    from .calling import AXES, Worker

    worker, axes = getattr(request.module, "SHARED", (Worker, AXES))

    def start(resources: contextlib.ExitStack) -> RayWorkerGroup:
        cluster = resources.enter_context(RayVirtualCluster([8], use_gpus=False))
        return resources.enter_context(RayWorkerGroup(cluster, worker, [axes.size], sharding_annotations=axes))

    group: RayWorkerGroup = shared_group.ensure((worker, axes), start)
    return group


@pytest.fixture
def group(shared: "RayWorkerGroup") -> "RayWorkerGroup":
    """Return the shared group."""
    return shared


@pytest.fixture
def doomed(local_ray: None) -> Iterator["RayWorkerGroup"]:
    """Yield a group of two workers for the tests that lose some of them."""
    from fairlead_placement import RayVirtualCluster
    from fairlead_sharding import NamedSharding
    from fairlead_workergroup import RayWorkerGroup

    from .calling import Worker

    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker, sharding_annotations=NamedSharding.from_shape(dp=2, tp=1)) as group,
    ):
        yield group


@pytest.fixture
def clock(clock: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the clock of this process's deadlines, which a test can set forward."""
    from .faults import set_clock

    set_clock(monkeypatch, clock)
    return clock


@pytest.fixture
def puts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the size in bytes of each value that the test stores with `ray.put`."""
    from .faults import note_puts

    return note_puts(monkeypatch)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of the method of each request that a call of the test sends to a worker."""
    from .faults import note_requests

    return note_requests(monkeypatch)


@pytest.fixture(scope="module")
def lasting(local_ray: None, request: pytest.FixtureRequest) -> Iterator["RayWorkerGroup"]:
    """Yield the group that `make_lasting` of a module starts, for tests that change it and leave it usable.

    Its end checks that none of them has lost or leaked resources.
    """
    from fairlead_placement import RayVirtualCluster
    from fairlead_placement.testing import assert_no_leaks

    with (
        assert_no_leaks(timeout_s=60),
        RayVirtualCluster([4], use_gpus=False) as cluster,
        request.module.make_lasting(cluster) as group,
    ):
        yield group


@pytest.fixture
def make_group(local_ray: None) -> Iterator[Callable[..., "RayWorkerGroup"]]:
    """Return a function that makes a group of two workers, after it has shut down the groups made before."""
    from fairlead_placement import RayVirtualCluster
    from fairlead_sharding import NamedSharding
    from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup

    from .restarting import AXES, VALUE, Worker

    groups: list[RayWorkerGroup] = []
    with RayVirtualCluster([4], use_gpus=False) as cluster:

        def make(*args: object, axes: NamedSharding = AXES, **options: object) -> RayWorkerGroup:
            for group in groups:
                assert group.shutdown()
            builder = RayWorkerBuilder(Worker, *(args or (VALUE,)))
            groups.append(RayWorkerGroup(cluster, builder, [axes.size], sharding_annotations=axes, **options))
            return groups[-1]

        yield make
        for group in groups:
            assert group.shutdown()
