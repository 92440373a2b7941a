# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests on several hosts. The tests skip where network namespaces are not available."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from .hosts import Host, Hosts
from .network import explain_unavailable

# Domain and rank of the hosts in the order in which they start, which differs from their physical order.
TOPOLOGY = [("b", 1), ("a", 1), ("b", 0), ("a", 0)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test ten minutes: several raylets share the machine, which may do something else too."""
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip the test if network namespaces are not available."""
    if reason := explain_unavailable():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def hosts(namespaces: None) -> Iterator[Hosts]:
    """Start a cluster with token authentication: a head without CPUs, and four hosts with two CPUs each.

    Tests that share this cluster must leave it unchanged.
    """
    with Hosts() as made:
        made.start_host(num_cpus=0)
        for domain, rank in TOPOLOGY:
            made.start_host(labels={"ray.io/gpu-domain": domain, "fairlead.io/topo-rank": str(rank)})
        yield made


@pytest.fixture(scope="session")
def addresses(hosts: Hosts) -> list[str]:
    """Return the addresses of the four shared hosts in physical order."""
    return [address for _, address in sorted(zip(TOPOLOGY, hosts.addresses[1:5], strict=True))]


@pytest.fixture
def start_spare(hosts: Hosts) -> Iterator[Callable[[], Host]]:
    """Return a function that adds a host, last in physical order, with a resource `spare`, for a test to kill."""
    started: list[Host] = []

    def start() -> Host:
        started.append(hosts.start_host(resources={"spare": 3}, labels={"ray.io/gpu-domain": "z"}))
        return started[-1]

    yield start
    left = [host for host in started if hosts.kill(host)]
    if left:  # The test failed. The next one fails too unless the cluster has noticed the dead hosts.
        time.sleep(5)


@pytest.fixture
def make_hosts(namespaces: None) -> Iterator[Callable[..., Hosts]]:
    """Return a function like `Hosts` that starts a cluster for one test. The cluster is removed after the test."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(Hosts(**options))
