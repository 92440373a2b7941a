# SPDX-License-Identifier: Apache-2.0
"""Lanes that tests without Ray share."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from fairlead_workergroup._membership.machine import Membership
from fairlead_workergroup._membership.phases import Phase

from ..lanes import Group, open_group


@pytest.fixture
def group(monkeypatch, request) -> Iterator[Group]:
    """Yield a lane with two workers; with a parameter that is true, a call is made before it opens."""
    monkeypatch.setattr("fairlead_lane._transport.find_ended", lambda streams: {})
    with open_group(early=getattr(request, "param", False)) as made:
        yield made


@pytest.fixture
def sender():
    """Return a sender whose lanes do nothing."""
    now = SimpleNamespace(
        members=[SimpleNamespace(slot=None, failure=None)], sharding=None, is_broken=False, ended=False
    )
    roster = SimpleNamespace(connected=True, ending=False, detour=None, check_connected=lambda: None)
    roster.now, roster.check_alive = now, lambda: now
    membership = Membership(roster, SimpleNamespace(policy=SimpleNamespace(on_failure=False)), None, None)
    membership._phase = Phase.SERVING
    membership.describe_wait = lambda advice="": f"A restart goes on. {advice}"
    described = SimpleNamespace(worker_class=SimpleNamespace(concurrent=False))
    return SimpleNamespace(
        roster=roster,
        described=described,
        transport=None,
        users_of_transport=0,
        membership=membership,
        opens=lambda _: None,
    )
