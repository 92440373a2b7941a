# SPDX-License-Identifier: Apache-2.0
"""Changes of the members of a group without Ray: their order, and restarts of ranks."""

import threading
from types import SimpleNamespace

import pytest
from ray.util.placement_group import PlacementGroup

from fairlead_placement import HeadTimeoutError, Slot
from fairlead_sharding import NamedSharding
from fairlead_workergroup._calls.core import Core
from fairlead_workergroup._elastic.restart import RestartRanks
from fairlead_workergroup._membership.machine import Membership
from fairlead_workergroup._membership.model import Started
from fairlead_workergroup._membership.operations import RestartPolicy, Start
from fairlead_workergroup._membership.roster import Roster
from fairlead_workergroup._start.layout import lay_out
from fairlead_workergroup._world import NEVER, Deadline
from fairlead_workergroup.exceptions import LateWorker, ResizeTimeoutError, WorkerFailureError, WorkerGroupError


class Act:
    """An operation that calls a function, and changes nothing."""

    def __init__(self, name, act):
        self.name, self.act = name, act

    def plan(self, now, ask):
        self.act()


@pytest.fixture
def membership():
    roster = SimpleNamespace(connected=True, ending=False, connection=SimpleNamespace(check=lambda: None))
    roster.now = SimpleNamespace(members=[], sharding=None, is_broken=False, ended=False)
    roster.check_alive = lambda: roster.now
    made = Membership(roster, SimpleNamespace(policy=SimpleNamespace(on_failure=False)), None, None)
    made.turns = SimpleNamespace(end_change=lambda error: False)
    return made


@pytest.fixture
def busy(membership):
    """Yield an event that ends an operation which is under way."""
    begun, goes_on = threading.Event(), threading.Event()
    change = membership.begin(Act("a change", lambda: (begun.set(), goes_on.wait(60))))
    assert begun.wait(20)
    yield goes_on
    goes_on.set()
    assert change.wait(Deadline.after(20))


def test_order(membership, busy):
    """Operations run in the order in which they were requested, and an error reaches the one who waits for it."""
    ran = []

    def fail():
        raise KeyError("a name")

    changes = [membership.begin(Act("one", lambda: ran.append(1))), membership.begin(Act("two", fail))]
    changes.append(membership.begin(Act("three", lambda: ran.append(3))))
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
        membership.change(Act("a wish", lambda: ran.append(1)), Deadline.after(0.01))
    busy.set()
    assert membership.begin(Act("the next", lambda: None)).wait(Deadline.after(20))
    assert not ran


def test_request_of_the_present_change(membership):
    """What a change waits for cannot wait for the next one."""
    with pytest.raises(WorkerGroupError, match="inner cannot be requested by what the present change"):
        membership.change(Act("outer", lambda: membership.change(Act("inner", lambda: None))))


@pytest.fixture
def core(membership):
    """Return what sends the calls of the group."""
    made = Core(membership._roster, None, membership, None)
    made._submit = lambda call: call.submit()
    return made


def make_call(submit=lambda: "sent", *, is_hook=False):
    return SimpleNamespace(submit=submit, is_hook=is_hook)


def test_call_while_a_call_is_sent(core):
    """A signal handler that makes a call while its thread sends one is refused, instead of waiting for itself."""
    with pytest.raises(WorkerGroupError, match="Set a flag in the handler"):
        core._try(make_call(lambda: core._try(make_call())))
    assert core._try(make_call()) == "sent"


def test_call_of_a_finalizer_while_its_thread_changes_the_group(core, membership):
    """It is refused at once, because the change would wait for itself."""
    refused = []

    def call():
        core.begin_change()
        with pytest.raises(WorkerGroupError, match="finalizer") as caught:
            core._try(make_call())
        refused.append(caught.value)
        core.end_change()

    assert membership.begin(Act("a change", call)).wait(Deadline.after(20))
    assert refused


def test_calls_during_a_change(core):
    """Calls wait while a change begins an epoch, except those of the change itself."""
    core.begin_change()
    assert not core.wait_for_turn(Deadline.after(0.01))
    assert core._try(make_call(is_hook=True)) == "sent"
    results = []
    waiting = threading.Thread(target=lambda: results.append(core.wait_for_turn(NEVER)))
    waiting.start()
    core.end_change()
    waiting.join(20)
    assert results == [True]


def test_end(membership, busy):
    """When the group ends, nothing begins any more."""
    membership._roster.ending = True
    membership._roster.ended_error = lambda: WorkerGroupError("it has been shut down")
    with pytest.raises(WorkerGroupError, match="shut down"):
        membership.begin(Act("late", lambda: None))


START_S = 120.0


def make_slot(node_id, index):
    return Slot(
        placement_group=PlacementGroup.empty(),
        bundle_index=index,
        node_idx=0,
        node_id=node_id,
        node_ip=node_id,
        node_rank=0,
        local_rank=index,
    )


class Crew:
    """Two workers that start at once, of which rank 0 is busy; it notes which ranks start."""

    policy = RestartPolicy(on_failure=False, max_restarts=0, scope="worker")

    def __init__(self, roster):
        self.roster, self.moved = roster, []

    def find_lost(self):
        return {}

    def acquire(self, before, plan, undo, deadline):
        return SimpleNamespace(places=before.places)

    def start(self, staged, ranks, undo, deadline, check):
        self.moved.append(list(ranks))
        made = SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: "00"))
        now = self.roster.now
        return [Started(made, staged.places[rank], now.processes[rank]) for rank in ranks]

    def facts(self, staged):
        return [SimpleNamespace(since=lambda before: {}) for _ in staged.places]

    def check_head(self):
        pass

    def end(self, ranks):
        return []

    def publish(self, *, wait):
        pass

    def settle(self):
        pass

    commit = end


class Requests:
    """The requests to the workers, and the methods of the user."""

    timeout_s = START_S

    def quiesce(self, members, deadline, check):
        return (LateWorker(0, {}, "a", 7, "step", 1.0),)

    def send_facts(self, member, changes, deadline, *, alone):
        pass

    def on_restart(self, ranks, deadline):
        return []


def start_two():
    places = lay_out([make_slot("a", rank) for rank in range(2)], prefix="policy")
    roster, requests = Roster("policy", places, NamedSharding.from_shape(worker=2)), Requests()
    crew = Crew(roster)
    membership = Membership(roster, crew, requests, requests)
    Core(roster, None, membership, None)
    membership.change(Start())
    crew.moved.clear()
    return crew, membership


def test_silent_head(monkeypatch):
    """If the head is silent when old processes are about to end, none of them ends, and all ranks keep theirs."""
    crew, membership = start_two()

    def check_head():
        raise HeadTimeoutError("no answer")

    monkeypatch.setattr(crew, "check_head", check_head)
    monkeypatch.setattr(crew, "end", lambda ranks: pytest.fail("a process was ended"))
    with pytest.raises(HeadTimeoutError):
        membership.change(RestartRanks((1,), elsewhere=True), Deadline.after(START_S))
    now = crew.roster.now
    assert (now.epoch, now.lost, crew.moved) == (0, {}, [])


def test_processes_that_do_not_end(monkeypatch):
    """Ranks whose old processes were told to end are lost, also if some are still there."""
    crew, membership = start_two()
    monkeypatch.setattr(crew, "end", lambda ranks: ["pid 7 on node a"])
    with pytest.raises(WorkerFailureError, match="pid 7 on node a"):
        membership.change(RestartRanks((1,), elsewhere=True), Deadline.after(START_S))
    now = crew.roster.now
    assert (now.epoch, list(now.lost), crew.moved) == (0, [1], [])
