# SPDX-License-Identifier: Apache-2.0
"""A reserved cluster for the tests that need workers."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def cluster(local_ray: None) -> Iterator[object]:
    """One logical node with eight CPU slots."""
    from fairlead_placement import RayVirtualCluster

    with RayVirtualCluster([8], use_gpus=False) as reserved:
        yield reserved
