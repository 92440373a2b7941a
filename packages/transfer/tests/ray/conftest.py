# SPDX-License-Identifier: Apache-2.0
"""Groups that tests of links share."""

import pytest

from fairlead_sharding import NamedSharding
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup

from ..holders import AsyncHolder, Holder


@pytest.fixture(scope="module")
def groups(slots):
    """Return a group sharded over (dp=2, tp=2), and one over tp=2 with 2 replicas."""
    train, serve = NamedSharding.from_shape(dp=2, tp=2), NamedSharding.from_shape(replica=2, tp=2)
    with (
        RayWorkerGroup(
            slots[:4],
            RayWorkerBuilder(Holder, {0: ("tp", "dp")}, 1.0),
            sharding_annotations=train,
            name_prefix="policy",
        ) as policy,
        RayWorkerGroup(
            slots[4:8], RayWorkerBuilder(Holder, {1: "tp"}), sharding_annotations=serve, name_prefix="generation"
        ) as generation,
    ):
        yield policy, generation


@pytest.fixture(scope="module")
def engine(slots):
    """Return a group of asyncio workers, whose methods overlap."""
    with RayWorkerGroup(
        slots[8:],
        RayWorkerBuilder(AsyncHolder, {1: "tp"}, 1.0),
        sharding_annotations=NamedSharding.from_shape(replica=2, tp=2),
        async_communication=True,
    ) as made:
        yield made


@pytest.fixture
def gate(tmp_path):
    """Yield the path of a file that workers wait for. It is created at the end of the test at the latest."""
    path = tmp_path / "gate"
    yield path
    path.touch()
