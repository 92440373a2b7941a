# SPDX-License-Identifier: Apache-2.0
"""What `map` does for each item, with workers that answer at once and without Ray."""

import random
import threading
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import ray

from fairlead_workergroup._calls import map as map_module
from fairlead_workergroup._calls.execution import SendState
from fairlead_workergroup._calls.map import MapOptions, _Balancer, _Item, map_items
from fairlead_workergroup._transport.futures import ON_THREAD, block
from fairlead_workergroup._world import Deadline
from fairlead_workergroup.exceptions import CallTimeoutError, WorkerFailureError

WORKERS, ITEMS = 500, 2_000


# How often anything has looked whether an answer is there.
looked = Counter()


class Reference:
    """A reference to an answer."""

    def __init__(self, value):
        self.value = value

    def future(self):
        looked[self.value] += 1
        future = Future()
        future.set_result(self.value)
        return future


class Call:
    """A call of one worker that has been answered."""

    sending, send_state = None, SendState.SENT

    def __init__(self, value):
        self.futures = [Reference(value)]
        self.order = SimpleNamespace(deadline=Deadline())

    def shape(self, values):
        return values[0]

    async def results(self, on):
        return self.futures[0].value

    def withdraw(self, force):
        return True


@pytest.fixture
def sender(monkeypatch):
    """A sender of a group whose workers return their items."""
    looked.clear()
    # Without Ray: a wait by Ray is given references, each of which it looks at.
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (looked.update(ref.value for ref in refs), (refs, []))[1])
    monkeypatch.setattr(
        map_module, "dispatch", lambda sender, owner, method, to, columns, *_, **__: Call(columns[0].values[0])
    )
    method = SimpleNamespace(name="work", result="value", function=None, check=lambda *_: None)
    monkeypatch.setattr(map_module, "replace", lambda called, **_: called)
    now = SimpleNamespace(has=lambda ranks: True)
    roster = SimpleNamespace(check_connected=lambda: None, now=now, connected=True)
    counters = SimpleNamespace(add=lambda **_: None)
    worker_class = SimpleNamespace(method=lambda _: method)
    described = SimpleNamespace(worker_class=worker_class)
    return SimpleNamespace(
        described=described, check_retries=lambda _: None, counters=counters, roster=roster, put=lambda value: value
    )


@pytest.mark.parametrize("strategy", ["round_robin", "least_loaded"])
def test_each_answer_is_looked_at_once(sender, strategy):
    """The cost of an item does not grow with the number of items that are under way: a wait is given each once."""
    options = MapOptions(strategy=strategy, move_items=False)
    results = map_items(sender, None, range(WORKERS), "work", range(ITEMS), options)
    assert list(results) == list(range(ITEMS))
    assert looked == dict.fromkeys(range(ITEMS), 1)


class LateCall(Call):
    """A call whose deadline has passed; all of them are answered but the one that hangs."""

    checks = 0

    def __init__(self, value, hangs):
        super().__init__(value)
        self.order = SimpleNamespace(deadline=Deadline.after(0.0))
        self.hangs = hangs
        if hangs:
            self.futures = [SimpleNamespace(future=Future)]

    def check_late(self, deadline):
        LateCall.checks += 1
        assert LateCall.checks < 100, "the map looks at the same call for ever"
        if self.hangs:
            raise CallTimeoutError("work", waited_s=0.0, called=1, late=())
        return Deadline()


@pytest.fixture
def late_calls(monkeypatch):
    """Every item is late, and item 0 never answers."""
    monkeypatch.setattr(LateCall, "checks", 0)
    monkeypatch.setattr(
        map_module,
        "dispatch",
        lambda sender, owner, method, to, columns, *_, **__: LateCall(value := columns[0].values[0], value == 0),
    )


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("strategy", ["round_robin", "least_loaded"])
def test_answers_that_arrive_as_an_item_times_out(sender, late_calls, strategy, ordered):
    """They count: the map goes on with the items after the one that hangs."""
    options = MapOptions(strategy=strategy, move_items=False, ordered=ordered, return_exceptions=True)
    results = list(map_items(sender, None, range(3), "work", range(20), options))
    (late,) = [result for result in results if isinstance(result, CallTimeoutError)]
    assert late.__notes__ == ["item 0 of map('work')"]
    values = [result for result in results if result is not late]
    assert (values if ordered else sorted(values)) == list(range(1, 20))
    assert not ordered or results[0] is late
    assert LateCall.checks == 1


def test_a_value_that_is_on_its_way(sender, monkeypatch):
    """A worker that has finished is not late; the wait for its value does not keep a processor busy."""
    value = Future()

    class Transfer(LateCall):
        """A call whose value takes a while to this process."""

        def check_late(self, deadline):
            if not self.checks:
                threading.Timer(0.2, value.set_result, ["value"]).start()
            return super().check_late(deadline)

    call = Transfer(0, hangs=False)
    call.futures = [SimpleNamespace(future=lambda: value)]
    monkeypatch.setattr(LateCall, "checks", 0)
    monkeypatch.setattr(map_module, "dispatch", lambda *_, **__: call)
    options = MapOptions(strategy="round_robin", move_items=False)
    assert list(map_items(sender, None, [0], "work", [0], options)) == ["value"]


def test_the_item_that_a_loss_names(sender, monkeypatch):
    """It is the first that the lost worker had, also if the loss of a later one arrives first."""

    class Lost(Call):
        def __init__(self, value):
            super().__init__(value)
            if value in (1, 5):  # both of the same worker; the first is still under way
                answer = Future()
                self.futures = [SimpleNamespace(future=lambda: answer)]
                if value == 5:
                    answer.set_exception(RuntimeError("the worker is dead"))

        async def results(self, on):
            raise WorkerFailureError(())

    monkeypatch.setattr(
        map_module, "dispatch", lambda sender, owner, method, to, columns, *_, **__: Lost(columns[0].values[0])
    )
    monkeypatch.setattr(map_module, "retrieve_late", lambda *_: None)
    sender.cancel = lambda *_, **__: None
    with pytest.raises(WorkerFailureError) as caught:
        list(map_items(sender, None, range(4), "work", range(12), MapOptions(strategy="round_robin", move_items=False)))
    assert caught.value.__notes__ == ["item 1 of map('work'); workers lost with it: 1"]


def test_the_least_loaded_worker(sender):
    """It is the first of those with the fewest items, whichever items have finished and workers were lost."""
    rng = random.Random(0)
    options = MapOptions(strategy="least_loaded", move_items=True, max_in_flight=100)
    balancer, expected = (
        _Balancer(sender, None, range(50), sender.described.worker_class.method("work"), options),
        dict.fromkeys(range(50), 0),
    )
    for turn in range(2_000):
        least = min(expected, key=expected.__getitem__)
        assert balancer._choose() == least
        balancer._send(_Item(turn, turn, least), may_wait=True)
        expected[least] += 1
        for call in rng.sample(list(balancer._sent), rng.randrange(3) if turn > 50 else 0):
            rank = balancer._sent[call].rank
            value = call.futures[0].value
            assert block(balancer.settle(call, call.futures[0].future(), ON_THREAD)) == [(value, value)]
            if rank in expected:
                expected[rank] -= 1
        if turn % 50 == 0 and len(expected) > 20:
            lost = rng.choice(list(expected))
            assert balancer._handle_loss(_Item(turn, turn, lost), WorkerFailureError(())) == []
            del expected[lost]
