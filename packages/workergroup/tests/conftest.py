# SPDX-License-Identifier: Apache-2.0
"""A reserved cluster for the tests that need workers."""

import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

# No deadline and no health check of speed: on a busy machine they would fail tests for being slow. No database: a test
# run leaves no files.
settings.register_profile(
    "fairlead-workergroup", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fairlead-workergroup")


@pytest.fixture
def cluster(local_ray: None) -> Iterator[object]:
    """One logical node with eight CPU slots."""
    from fairlead_placement import RayVirtualCluster

    with RayVirtualCluster([8], use_gpus=False) as reserved:
        yield reserved


@pytest.fixture
def eventually() -> Callable[..., bool]:
    """Waits until something holds, at most some seconds; says whether it came to hold."""

    def wait(holds: Callable[[], object], timeout_s: float = 20.0) -> bool:
        deadline = time.monotonic() + timeout_s
        while not (held := holds()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return bool(held)

    return wait
