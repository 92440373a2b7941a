# SPDX-License-Identifier: Apache-2.0
"""The tests of calls that run by Ray and by a lane, a third time on a group whose workers are threads, without a Ray.

The fixtures of this module replace those of the tests. `pytest_collection_modifyitems` leaves out the tests that need
Ray or processes: those with the marks `by_ray` and `by_processes`, and those that start a group of their own.
"""

from collections.abc import Iterator

import pytest

from ..calling import AXES, Worker
from ..local import Group, no_ray  # noqa: F401  a fixture of all tests
from ..ray.test_arguments import *  # noqa: F403
from ..ray.test_call import *  # noqa: F403
from ..ray.test_errors import *  # noqa: F403
from ..ray.test_functions import *  # noqa: F403
from ..ray.test_kinds import *  # noqa: F403
from ..ray.test_waiting import *  # noqa: F403


@pytest.fixture(scope="module")
def shared_local() -> Iterator[Group]:
    with Group(Worker, sharding_annotations=AXES) as group:
        yield group


@pytest.fixture
def group(shared_local: Group) -> Group:
    """Return eight threads."""
    return shared_local


@pytest.fixture
def doomed() -> Iterator[Group]:
    """Yield two threads."""
    with Group(Worker, dp=2, tp=1) as group:
        yield group
