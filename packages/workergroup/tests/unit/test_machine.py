# SPDX-License-Identifier: Apache-2.0
"""The owner of change: its phases, and what it does with operations that wait."""

import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from fairlead_workergroup._membership.machine import Membership
from fairlead_workergroup._membership.operations import Route
from fairlead_workergroup._membership.phases import LEGAL, Phase
from fairlead_workergroup._world import NEVER, Deadline
from fairlead_workergroup.exceptions import ResizeTimeoutError, WorkerGroupError

DOCUMENT = Path(__file__).parents[4] / "docs" / "architecture.md"


def test_document():
    """The document shows the phases and transitions of the table."""
    rows = dict(re.findall(r"^\| ([a-z ]+) \| ([a-z, ]+) \|$", DOCUMENT.read_text(), re.MULTILINE))
    shown = {name: set(after.split(", ")) for name, after in rows.items() if name in {one.value for one in Phase}}
    assert shown == {one.value: {after.value for after in LEGAL[one]} for one in Phase if LEGAL[one]}


@pytest.fixture
def membership():
    roster = SimpleNamespace(connected=True, ending=False, check_connected=lambda: None)
    roster.now = SimpleNamespace(members=[], sharding=None, is_broken=False, ended=False)
    roster.check_alive = lambda: roster.now
    made = Membership(roster, SimpleNamespace(policy=SimpleNamespace(on_failure=False)), None, None)
    made._phase = Phase.SERVING
    return made


@pytest.fixture
def busy(membership):
    """Yield an event that ends an operation which is under way."""
    begun, goes_on = threading.Event(), threading.Event()
    change = membership.begin(Route("a change", lambda gate: (begun.set(), goes_on.wait(60))))
    assert begun.wait(20)
    yield goes_on
    goes_on.set()
    assert change.wait(Deadline.after(20))


def test_order(membership, busy):
    """Operations run in the order in which they were requested, and an error reaches the one who waits for it."""
    ran = []

    def fail(gate):
        raise KeyError("a name")

    changes = [membership.begin(Route("one", lambda gate: ran.append(1))), membership.begin(Route("two", fail))]
    changes.append(membership.begin(Route("three", lambda gate: ran.append(3))))
    assert not changes[0].wait(Deadline.after(0.01))
    busy.set()
    assert changes[2].wait(Deadline.after(20))
    assert ran == [1, 3]
    for _ in range(2):
        with pytest.raises(KeyError, match="a name"):
            changes[1].wait()


def test_deadline(membership, busy):
    """An operation that has not begun by its deadline never begins."""
    ran = []
    with pytest.raises(ResizeTimeoutError, match=r"a wish had not begun after .* Another thread"):
        membership.change(Route("a wish", lambda gate: ran.append(1)), Deadline.after(0.01))
    busy.set()
    assert membership.begin(Route("the next", lambda gate: None)).wait(Deadline.after(20))
    assert not ran


def test_interrupt_as_an_operation_begins(membership, busy, monkeypatch):
    """An operation whose caller is interrupted is undone, also if it leaves the queue at that moment."""
    begun, undone = threading.Event(), threading.Event()
    operation = Route("a wish", lambda gate: (begun.set(), undone.wait(60)))
    change, withdraw = membership.begin(operation), membership.withdraw

    def withdraw_late(one):
        busy.set()
        assert begun.wait(20)
        return withdraw(one)

    monkeypatch.setattr(membership, "withdraw", withdraw_late)
    monkeypatch.setattr(change, "cancel", undone.set)
    membership.give_up(operation)
    assert undone.is_set()
    undone.set()
    assert change.wait(Deadline.after(20))


def test_request_of_the_present_change(membership):
    """What a change waits for cannot wait for the next one."""
    with pytest.raises(WorkerGroupError, match="inner cannot be requested by what the present change"):
        membership.change(Route("outer", lambda gate: membership.change(Route("inner", lambda gate: None))))


def test_call_while_a_call_is_sent(membership):
    """A signal handler that makes a call while its thread sends one is refused, instead of waiting for itself."""
    with pytest.raises(WorkerGroupError, match="Set a flag in the handler"):
        membership.gate.run(lambda: membership.gate.run(lambda: None, NEVER), NEVER)
    assert membership.gate.run(lambda: "sent", Deadline.after(1)) == "sent"


def test_closed_gate(membership):
    """Calls wait while the gate is closed, except those of the change itself."""
    membership.gate.close()
    assert membership.gate.run(lambda: "sent", Deadline.after(0.01)) is None
    assert membership.gate.run(lambda: "sent", NEVER, passes=True) == "sent"
    results = []
    waiting = threading.Thread(target=lambda: results.append(membership.gate.run(lambda: "sent", NEVER)))
    waiting.start()
    membership.gate.open()
    waiting.join(20)
    assert results == ["sent"]


def test_end(membership, busy):
    """When the group ends, nothing begins any more."""
    membership._roster.ending = True
    membership._roster.ended_error = lambda: WorkerGroupError("it has been shut down")
    assert membership.phase is Phase.ENDING
    with pytest.raises(WorkerGroupError, match="shut down"):
        membership.begin(Route("late", lambda gate: None))
    with pytest.raises(WorkerGroupError, match="shut down"):
        membership._enter(Phase.PREPARING)


def test_illegal_transition():
    """A transition that is not in the table is a defect of the library."""
    roster = SimpleNamespace(ending=False)
    with pytest.raises(AssertionError, match="cannot go from"):
        Membership(roster, SimpleNamespace(policy=None), None, None)._enter(Phase.SERVING)
