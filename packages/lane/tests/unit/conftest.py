# SPDX-License-Identifier: Apache-2.0
"""Lanes that tests without Ray share."""

from collections.abc import Iterator

import pytest

from ..lanes import Group, find_ends_by, make_sender, open_group


@pytest.fixture
def group(monkeypatch, request) -> Iterator[Group]:
    """Yield a lane with two workers; with a parameter that is true, a call is made before it opens."""
    find_ends_by(monkeypatch, lambda streams: {})
    with open_group(early=getattr(request, "param", False)) as made:
        yield made


@pytest.fixture
def sender():
    """Return a sender whose lanes do nothing."""
    return make_sender()
