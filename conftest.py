# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all test suites. Ray is not imported here: some packages are tested without it."""

import signal
import sys
from collections.abc import Iterator

import pytest

# A shell has what it starts in the background ignore Ctrl-C, and what that starts would as well; some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """A Ray of this module's own: 16 CPUs and 4 GPUs, none of them real."""
    import ray

    ray.init(address="local", num_cpus=16, num_gpus=4, include_dashboard=False, logging_level="warning")
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing is lost or left behind by any test that uses Ray."""
    if "local_ray" in request.fixturenames:
        request.getfixturevalue("local_ray")
    if "ray" not in sys.modules:
        yield
        return
    from fairlead_placement.testing import assert_no_leaks

    with assert_no_leaks():
        yield
