# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all test suites. Ray is not imported here: some packages are tested without it."""

import signal
import sys
from collections.abc import Iterator

import pytest

# A shell has what it starts in the background ignore Ctrl-C, and what that starts would as well; some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class LocalRay:
    """The local Ray that test modules share: starting one takes several seconds of all processors."""

    def __init__(self) -> None:
        self._session = ""

    def _is_running(self) -> bool:
        ray = sys.modules.get("ray")
        return bool(
            ray
            and self._session
            and ray.is_initialized()
            and ray.get_runtime_context().get_session_name() == self._session
        )

    def ensure(self) -> None:
        """Start it unless it runs: 16 CPUs and 4 GPUs, none of them real."""
        if self._is_running():
            return
        import ray

        ray.init(address="local", num_cpus=16, num_gpus=4, include_dashboard=False, logging_level="warning")
        self._session = ray.get_runtime_context().get_session_name()

    def end(self) -> None:
        """End it, if it runs."""
        if self._is_running():
            sys.modules["ray"].shutdown()
        self._session = ""


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[LocalRay]:
    """The local Ray of this test run; it ends with the run."""
    shared = LocalRay()
    yield shared
    shared.end()


@pytest.fixture(scope="module", autouse=True)
def no_ray_of_another_module(request: pytest.FixtureRequest, shared_ray: LocalRay) -> None:
    """Run a module without the shared Ray until a test asks for it, unless its first test does."""
    first = next(item for item in request.session.items if item.getparent(pytest.Module) is request.node)
    if "local_ray" not in getattr(first, "fixturenames", ()):
        shared_ray.end()


@pytest.fixture(scope="module")
def local_ray(shared_ray: LocalRay) -> None:
    """A Ray with 16 CPUs and 4 GPUs, none of them real; a test that ends it is the last one of its module to use it."""
    shared_ray.ensure()


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
