# SPDX-License-Identifier: Apache-2.0
"""Changes of the members of a group without Ray: their order, and the calls that wait for them."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from ray.util.placement_group import PlacementGroup

from fairlead_placement import HeadTimeoutError, Slot
from fairlead_sharding import NamedSharding
from fairlead_workergroup._membership import change, operations
from fairlead_workergroup._membership.change import Changes
from fairlead_workergroup._membership.core import Core, Sent
from fairlead_workergroup._membership.operations import Operation, restart_ranks
from fairlead_workergroup._membership.provision import Staged
from fairlead_workergroup._model import GroupState, Member, RestartPolicy
from fairlead_workergroup._start.layout import lay_out
from fairlead_workergroup._world import NEVER, Deadline
from fairlead_workergroup.exceptions import LateWorker, ResizeTimeoutError, WorkerFailureError, WorkerGroupError

START_S = 120.0


def act(name, function):
    """Return an operation that calls a function, and changes nothing."""
    return Operation(name, lambda now, core, until: function() and None)


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


class Provisioner:
    """Two workers that start at once; it notes which ranks start, and which end."""

    def __init__(self, core):
        self.core, self.started, self.left = core, [], []
        self.worker_class = SimpleNamespace(concurrent=False)
        self.spec = SimpleNamespace(start_timeout_s=START_S)
        self.owned = SimpleNamespace(end=lambda members, until: self.left)

    def deadline(self, timeout_s):
        return Deadline.after(START_S if timeout_s is None else timeout_s)

    def acquire(self, before, plan, until):
        return Staged(before, self.worker_class, [], SimpleNamespace(address="a", port=1))

    def start(self, staged, ranks, until):
        self.started.append(list(ranks))
        return {rank: staged.state.members[rank] for rank in ranks}

    def publish(self, starting=None, *, wait=False):
        pass

    def settle(self, until):
        pass

    commit = settle


@pytest.fixture
def core():
    """Return the core of a group of two workers, of which rank 0 is busy."""
    places = lay_out([make_slot("a", rank) for rank in range(2)], prefix="policy")
    sharding = NamedSharding.from_shape(worker=2)
    made = Core("policy", places, sharding, policy=RestartPolicy(max_restarts=3))
    members = [Member(place, handle=place.rank, actor_id=f"actor {place.rank}", node_id="a", pid=7) for place in places]
    made.commit(GroupState(0, 0, sharding, tuple(members), phase="serving", variables=({}, {})))
    made.changes = Changes(made, Provisioner(made), lambda *_: None, None, None)
    return made


@pytest.fixture
def changes(core, monkeypatch):
    monkeypatch.setattr(operations, "find_lost", lambda *_: {})
    monkeypatch.setattr(change, "alive_nodes", frozenset)
    monkeypatch.setattr(change, "find_late", lambda *_, **__: [0])
    monkeypatch.setattr(change, "late_workers", lambda _: (LateWorker(0, {}, "a", 7, "step", 1.0),))
    return core.changes


@pytest.fixture
def busy(changes):
    """Yield an event that ends an operation which is under way."""
    begun, goes_on = threading.Event(), threading.Event()
    running = changes.request(act("a change", lambda: (begun.set(), goes_on.wait(60))), NEVER)
    assert begun.wait(20)
    yield goes_on
    goes_on.set()
    assert running.wait(Deadline.after(20))


def test_order(changes, busy):
    """Operations run in the order in which they were requested, and an error reaches the one who waits for it."""
    ran = []

    def fail():
        raise KeyError("a name")

    requested = [
        changes.request(act(name, function), NEVER)
        for name, function in (("first", lambda: ran.append(1)), ("second", fail), ("third", lambda: ran.append(3)))
    ]
    assert not requested[0].wait(Deadline.after(0.01))
    busy.set()
    assert requested[2].wait(Deadline.after(20))
    assert ran == [1, 3]
    for _ in range(2):
        with pytest.raises(KeyError, match="a name"):
            requested[1].wait()


def test_deadline(changes, busy):
    """An operation that has not begun by its deadline never begins."""
    ran = []
    with pytest.raises(ResizeTimeoutError, match=r"a wish had not begun after .* Another thread"):
        changes.run(act("a wish", lambda: ran.append(1)), Deadline.after(0.01))
    busy.set()
    assert changes.request(act("the next", lambda: None), NEVER).wait(Deadline.after(20))
    assert not ran


def test_request_of_the_present_change(changes):
    """What a change waits for cannot wait for the next one."""
    inner = act("inner", lambda: None)
    with pytest.raises(WorkerGroupError, match="inner cannot be requested by what the present change"):
        changes.run(act("outer", lambda: changes.run(inner, NEVER)), NEVER)


def test_end(core, changes, busy):
    """When the group ends, nothing begins any more."""
    core.ending = True
    with pytest.raises(WorkerGroupError, match="shut down"):
        changes.request(act("late", lambda: None), NEVER)


def make_call(name="a call", *, is_hook=False):
    return SimpleNamespace(name=name, is_hook=is_hook, deadline=NEVER)


@pytest.fixture
def sent(core, monkeypatch):
    """Return the list of the calls that are sent."""
    calls = []

    def submit(call):
        calls.append(call.name)
        return Sent(call, [], 0)

    monkeypatch.setattr(core, "_submit", submit)
    return calls


def test_call_while_a_call_is_sent(core, monkeypatch):
    """A signal handler that makes a call while its thread sends one is refused, instead of waiting for itself."""
    monkeypatch.setattr(core, "_submit", lambda call: core.send(make_call()))
    with pytest.raises(WorkerGroupError, match="Set a flag in the handler"):
        core.send(make_call())


def test_call_of_a_finalizer_while_its_thread_changes_the_group(core, changes, sent):
    """It is refused at once, because the change would wait for itself."""
    refused = []

    def call():
        core.begin_change()
        with pytest.raises(WorkerGroupError, match="finalizer") as caught:
            core.send(make_call())
        refused.append(caught.value)
        core.end_change()

    assert changes.request(act("a change", call), NEVER).wait(Deadline.after(20))
    assert refused


def test_calls_during_a_change(core, sent):
    """Calls wait while a change begins an epoch, except those of the change itself."""
    core.begin_change()
    core.send(make_call("a hook", is_hook=True))
    waiting = threading.Thread(target=core.send, args=(make_call("a call"),))
    waiting.start()
    waiting.join(0.1)
    assert sent == ["a hook"]
    core.end_change()
    waiting.join(20)
    assert sent == ["a hook", "a call"]


def test_no_call_overtakes_those_that_wait_on_a_loop(core, changes, sent, monkeypatch):
    """A call that an event loop has made, and that waits for a restart, is sent before a later one of a thread."""
    submit, lost = core._submit, [SimpleNamespace(rank=1)]
    monkeypatch.setattr(core, "_submit", lambda call: lost if lost else submit(call))
    monkeypatch.setattr(changes, "restart_lost", lambda: None)
    first = core.send_or_queue(make_call("of the loop"))
    assert isinstance(first, Future)
    lost.clear()
    later = threading.Thread(target=core.send, args=(make_call("of the thread"),))
    later.start()
    later.join(0.1)
    assert sent == []
    core.end_change()
    later.join(20)
    assert sent == ["of the loop", "of the thread"]
    assert first.done()


def test_silent_head(core, changes, monkeypatch):
    """If the head is silent when old processes are about to end, none of them ends, and all ranks keep theirs."""

    def fail():
        raise HeadTimeoutError("no answer")

    provisioner = changes._provisioner
    monkeypatch.setattr(change, "alive_nodes", fail)
    monkeypatch.setattr(provisioner.owned, "end", lambda *_: pytest.fail("a process was ended"))
    with pytest.raises(HeadTimeoutError):
        changes.run(restart_ranks((1,), elsewhere=True), Deadline.after(START_S))
    assert (core.now.group_epoch, core.now.lost, provisioner.started) == (0, {}, [])


def test_processes_that_do_not_end(core, changes):
    """Ranks whose old processes were told to end are lost, also if some are still there."""
    provisioner = changes._provisioner
    provisioner.left.append("pid 7 on node a")
    with pytest.raises(WorkerFailureError, match="pid 7 on node a"):
        changes.run(restart_ranks((1,), elsewhere=True), Deadline.after(START_S))
    assert (core.now.group_epoch, list(core.now.lost), provisioner.started) == (0, [1], [])


def test_a_worker_that_is_replaced_is_not_lost(core):
    """The report of the loss of an incarnation that has been replaced says nothing about the next one."""
    before = core.now.members[1]
    assert core.note([(before, before.failure("killed", "first"))])[0].cause == "first"
    assert core.note([(before, before.failure("killed", "second"))])[0].cause == "first"
    after = Member(before.place, 1, handle=2, actor_id="another actor", node_id="a")
    core.commit(GroupState(0, 1, core.now.sharding, (core.now.members[0], after), phase="serving"))
    core.note([(before, before.failure("killed", "late"))])
    assert core.now.lost == {}
