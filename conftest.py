# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all test suites. This file does not import Ray, because some packages are tested without it."""

import ast
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# A shell starts background jobs with SIGINT ignored, and their children inherit that. Some tests send SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class LocalRay:
    """The local Ray that test modules share. Starting Ray occupies all processors for several seconds."""

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
        """Start the local Ray, unless it is running, with 16 logical CPUs and 4 logical GPUs."""
        if self._is_running():
            return
        import ray

        ray.init(address="local", num_cpus=16, num_gpus=4, include_dashboard=False, logging_level="warning")
        self._session = ray.get_runtime_context().get_session_name()

    def end(self) -> None:
        """Shut the local Ray down if it is running."""
        if self._is_running():
            sys.modules["ray"].shutdown()
        self._session = ""


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[LocalRay]:
    """Return the local Ray of this test run, which ends with the run."""
    shared = LocalRay()
    yield shared
    shared.end()


@pytest.fixture(scope="module", autouse=True)
def no_ray_of_another_module(request: pytest.FixtureRequest, shared_ray: LocalRay) -> None:
    """Shut the shared Ray down before a module whose first test does not use it."""
    first = next(item for item in request.session.items if item.getparent(pytest.Module) is request.node)
    if "local_ray" not in getattr(first, "fixturenames", ()):
        shared_ray.end()


@pytest.fixture(scope="module")
def local_ray(shared_ray: LocalRay) -> None:
    """Start a Ray with 16 logical CPUs and 4 logical GPUs.

    A test that shuts this Ray down must be the last one of its module that uses the fixture.
    """
    shared_ray.ensure()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that a test that uses Ray neither loses nor leaks resources."""
    if "local_ray" in request.fixturenames:
        request.getfixturevalue("local_ray")
    if "ray" not in sys.modules:
        yield
        return
    from fairlead_placement.testing import assert_no_leaks

    with assert_no_leaks():
        yield


@pytest.fixture
def run_readme() -> Callable[[Path], int]:
    """Run the python blocks of a short README in order, and compare the values in their comments.

    A line `expression  # value` says that the expression has the value. The fixture returns how many there were.
    """

    def run(readme: Path) -> int:
        text = readme.read_text(encoding="utf-8")
        assert len(text.splitlines()) < 150
        blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
        assert blocks
        scope: dict[str, object] = {}
        compared = 0
        for block in blocks:
            for statement in ast.parse(block).body:
                source = ast.get_source_segment(block, statement) or ""
                comment = block.splitlines()[(statement.end_lineno or 0) - 1][statement.end_col_offset :].strip()
                if isinstance(statement, ast.Expr) and comment.startswith("# "):
                    assert repr(eval(source, scope)) == comment.removeprefix("# "), source
                    compared += 1
                else:
                    exec(source, scope)
        return compared

    return run
