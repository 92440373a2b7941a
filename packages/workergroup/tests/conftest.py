# SPDX-License-Identifier: Apache-2.0
"""Clusters and groups that tests share."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let modules of this package that share the same group follow each other, so that it starts once.

    The tests that change the lasting group of a module come last: what it returns late would be a leak of others.
    """
    items[:] = [item for item in items if not (is_local(item) and needs_processes(item))]
    here = Path(__file__).parent
    places = [at for at, item in enumerate(items) if here in item.path.parents]
    modules = [[*tests] for _, tests in itertools.groupby((items[at] for at in places), find_module)]

    def has_own_group(tests: list[pytest.Item]) -> bool:
        return find_shared(tests) is None or hasattr(find_module(tests[0]).obj, "SHARED")

    def changes_lasting(item: pytest.Item) -> bool:
        return "lasting" in getattr(item, "fixturenames", ())

    ordered = [item for tests in sorted(modules, key=has_own_group) for item in sorted(tests, key=changes_lasting)]
    for at, item in zip(places, ordered, strict=True):
        items[at] = item


def is_local(item: pytest.Item) -> bool:
    """Return whether a test of calls runs on a `LocalGroup`."""
    return item.path.name in ("test_local_calls.py", "test_local_map.py")


def needs_processes(item: pytest.Item) -> bool:
    """Return whether a test of calls needs Ray, or workers in processes of their own."""
    marked = any(item.get_closest_marker(name) for name in ("by_ray", "by_processes"))
    return marked or "local_ray" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="module")
def cluster(local_ray: None) -> Iterator[object]:
    """Yield one logical node with eight CPU slots."""
    from fairlead_placement import RayVirtualCluster

    with RayVirtualCluster([8], use_gpus=False) as reserved:
        yield reserved


def find_module(item: pytest.Item) -> Any:
    return item.getparent(pytest.Module)


def find_shared(tests: Iterable[pytest.Item]) -> tuple[Any, Any] | None:
    """Return the class and the axes of the group that tests of a module share; None if they share no group."""
    users = [item for item in tests if "shared" in getattr(item, "fixturenames", ())]
    if not users:
        return None
    from .calling import AXES, Worker

    found: tuple[Any, Any] = getattr(find_module(users[0]).obj, "SHARED", (Worker, AXES))
    return found


class SharedGroup(contextlib.ExitStack):
    """The group that the present module shares with the next one, if there is one, and its cluster."""

    group: "RayWorkerGroup | None" = None


@pytest.fixture(scope="session")
def shared_group(shared_ray: object) -> Iterator[SharedGroup]:
    """Yield the place of the group that modules share."""
    with SharedGroup() as place:
        yield place


@pytest.fixture(scope="module")
def shared(local_ray: None, request: pytest.FixtureRequest, shared_group: SharedGroup) -> Iterator["RayWorkerGroup"]:
    """Yield one group for the tests of a module that leave it unchanged; `SHARED` is its class and its axes.

    If the next module shares a group of the same class and axes, it gets this one.
    """
    from fairlead_placement import RayVirtualCluster
    from fairlead_workergroup import RayWorkerGroup

    modules = [(module, find_shared(tests)) for module, tests in itertools.groupby(request.session.items, find_module)]
    at = next(at for at, (module, _) in enumerate(modules) if module is request.node)
    wanted = modules[at][1]
    assert wanted is not None
    if shared_group.group is None:
        cluster = shared_group.enter_context(RayVirtualCluster([8], use_gpus=False))
        shared_group.group = shared_group.enter_context(
            RayWorkerGroup(cluster, wanted[0], [wanted[1].size], sharding_annotations=wanted[1])
        )
    yield shared_group.group
    if [following for _, following in modules[at + 1 : at + 2]] != [wanted]:
        shared_group.group = None
        shared_group.close()


# The tests of calls, which run a second time with a lane open.
BY_LANE = frozenset({"test_arguments", "test_call", "test_errors", "test_functions", "test_kinds", "test_waiting"})
# Tests in which a call of one group depends on a call of the other one, so that both kinds of both are combined.
MIXED = frozenset({"test_a_late_argument", "test_deaths_that_are_not_the_workers"})


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of calls by Ray and by a lane, except for those of what Ray alone offers."""
    if metafunc.module.__name__.rpartition(".")[2] not in BY_LANE or metafunc.definition.get_closest_marker("by_ray"):
        return
    names = [name for name in ("group", "doomed") if name in metafunc.fixturenames]
    if metafunc.definition.name in MIXED:
        for name in names:
            metafunc.parametrize(name, ["ray", "lane"], indirect=True)
    elif names:
        metafunc.parametrize(names, [[way] * len(names) for way in ("ray", "lane")], ids=["ray", "lane"], indirect=True)


@pytest.fixture(scope="session", autouse=True)
def _all_lanes(both_kinds_of_sockets: None) -> None:
    """Let the lanes of all tests have both kinds of connections."""


@pytest.fixture
def group(shared: "RayWorkerGroup", request: pytest.FixtureRequest) -> Iterator["RayWorkerGroup"]:
    """Yield the shared group, with a lane open if the test says so."""
    with shared.lane() if getattr(request, "param", "ray") == "lane" else contextlib.nullcontext():
        yield shared


@pytest.fixture
def doomed(local_ray: None, request: pytest.FixtureRequest) -> Iterator["RayWorkerGroup"]:
    """Yield a group of two workers for the tests that lose some of them, with a lane open if the test says so."""
    from fairlead_placement import RayVirtualCluster
    from fairlead_sharding import NamedSharding
    from fairlead_workergroup import RayWorkerGroup

    from .calling import Worker

    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker, sharding_annotations=NamedSharding.from_shape(dp=2, tp=1)) as group,
    ):
        if getattr(request, "param", "ray") == "ray":
            yield group
            return
        with group.lane():
            yield group
            group.shutdown()  # the lane would wait for methods that a test has left running


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
