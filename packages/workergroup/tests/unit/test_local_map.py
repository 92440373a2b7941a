# SPDX-License-Identifier: Apache-2.0
"""The tests of `map` on a group whose workers are threads, without a Ray; see `test_local_calls`."""

from collections.abc import Iterator

import pytest

from ..local import Group, no_ray  # noqa: F401  a fixture of all tests
from ..ray.test_map import *  # noqa: F403
from ..ray.test_map import Worker


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    """Yield four threads."""
    with Group(Worker, workers=4) as group:
        yield group
