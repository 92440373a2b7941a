# SPDX-License-Identifier: Apache-2.0
"""The option and the fixture of the conformance tests, for `pytest -p`."""

import importlib
from collections.abc import Callable

import pytest

from .system import System


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the system."""
    parser.addoption("--system", metavar="MODULE:FACTORY", help="what makes the system that the cases run against")


@pytest.fixture
def make_system(pytestconfig: pytest.Config) -> Callable[[], System]:
    """Return the factory that `--system` names."""
    named = pytestconfig.getoption("--system")
    if not named or ":" not in named:
        raise pytest.UsageError(f"--system is {named!r}; pass it as module:factory.")
    module, _, factory = named.partition(":")
    made: Callable[[], System] = getattr(importlib.import_module(module), factory)
    return made
