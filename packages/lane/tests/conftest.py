# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _all_lanes(both_kinds_of_sockets: None) -> None:
    """Let the lanes of all tests have both kinds of connections."""
