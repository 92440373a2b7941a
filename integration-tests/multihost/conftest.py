# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests on several hosts. They skip where there can be no network namespaces."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from .hosts import Hosts
from .network import why_not

# Domain and rank of the hosts, in the order in which they start: their physical order is 4, 2, 3, 1.
TOPOLOGY = [("b", 1), ("a", 1), ("b", 0), ("a", 0)]


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips where there are none."""
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def hosts(namespaces: None) -> Iterator[Hosts]:
    """A head without CPUs and four hosts with two, shared by the tests that leave it so; it wants a token."""
    with Hosts() as made:
        made.start_host(num_cpus=0)
        for domain, rank in TOPOLOGY:
            made.start_host(labels={"ray.io/gpu-domain": domain, "fairlead.io/topo-rank": str(rank)})
        yield made


@pytest.fixture
def make_hosts(namespaces: None) -> Iterator[Callable[..., Hosts]]:
    """For a cluster of a test's own: as `Hosts`, and removed after the test."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(Hosts(**options))
