# SPDX-License-Identifier: Apache-2.0
"""What a group has to return is returned, also if Ctrl-C comes in between; without Ray."""

from types import SimpleNamespace

import pytest

from fairlead_workergroup._membership import owned
from fairlead_workergroup._membership.owned import Owned
from fairlead_workergroup._world import NEVER


@pytest.fixture
def done(monkeypatch):
    """What was ended and returned, in order."""
    done = []
    monkeypatch.setattr(owned, "kill_and_wait", lambda workers, until: done.append("workers") or [])
    return done


@pytest.fixture
def held():
    return Owned(SimpleNamespace(connected=True, name_prefix="policy", ended_error=lambda: ValueError("ended")))


WORKER = SimpleNamespace(actor_id="a", rank=0)


def test_an_interrupt_during_the_end(done, held):
    """Ctrl-C in one step does not keep the others from being done, and the step is done when it is repeated."""
    interrupts = [KeyboardInterrupt]

    def release():
        if interrupts:
            raise interrupts.pop()
        done.append("port")

    held.own(("slot", 1), lambda: done.append("slot"))
    held.own(("port",), release)
    held.own(("publication",), lambda: done.append("publication"))
    held.own_worker(WORKER)
    with pytest.raises(KeyboardInterrupt):
        held.close(NEVER)
    assert done == ["workers", "publication", "slot"]
    held.close(NEVER)
    assert done == ["workers", "publication", "slot", "port"]


def test_what_arrives_after_the_end(done, held):
    """What a change acquires while the group ends is returned at once."""
    assert held.close(NEVER)
    held.own(("port",), lambda: done.append("port"))
    with pytest.raises(ValueError, match="ended"):
        held.own_worker(WORKER)
    assert done == ["port", "workers"]
