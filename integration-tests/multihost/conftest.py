# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests on several hosts. They skip where there can be no network namespaces."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from .hosts import Host, Hosts
from .network import why_not

# Domain and rank of the hosts, in the order in which they start. It is not their physical order.
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


@pytest.fixture(scope="session")
def addresses(hosts: Hosts) -> list[str]:
    """Of the four shared hosts, in physical order."""
    return [address for _, address in sorted(zip(TOPOLOGY, hosts.addresses[1:5], strict=True))]


@pytest.fixture
def start_spare(hosts: Hosts) -> Iterator[Callable[[], Host]]:
    """Adds hosts, last in physical order, with a resource `spare`, for a test to kill."""
    started: list[Host] = []

    def start() -> Host:
        started.append(hosts.start_host(resources={"spare": 3}, labels={"ray.io/gpu-domain": "z"}))
        return started[-1]

    yield start
    left = [host for host in started if hosts.kill(host)]
    if left:  # the test failed: let the cluster notice, or the next one fails too
        time.sleep(5)


@pytest.fixture
def make_hosts(namespaces: None) -> Iterator[Callable[..., Hosts]]:
    """For a cluster of a test's own: as `Hosts`, and removed after the test."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(Hosts(**options))
