# SPDX-License-Identifier: Apache-2.0
"""Tests of the messages of a lane, with workers that are threads of this process, and without Ray."""

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import ray

zmq = pytest.importorskip("zmq")

from ray.exceptions import ActorDiedError, RayTaskError  # noqa: E402

from fairlead_workergroup.exceptions import LaneError, WorkerGroupError  # noqa: E402
from fairlead_workergroup.spi import Message  # noqa: E402

from ..lanes import (  # noqa: E402
    SLICE_S,
    WINDOW,
    Group,
    ask_nodes_by,
    block_shutdown_by,
    cancel_calls,
    find_ends_by,
    get_values,
    let_workers_look_rarely,
    limit_waiting_calls,
    look_rarely,
    open_group,
    references_of,
    wait_ready,
    wire,
)


def _bind_again(group: Group) -> bool:
    with group.hold():
        try:
            group.router._socket.bind(group.router.address)
        except zmq.ZMQError:
            return False
    return True


class TestMessages:
    def test_values(self, group):
        """Arguments and answers are those of the method."""
        assert get_values(group.send("echo", 1, [2], a={"b": None})) == [((1, [2]), {"a": {"b": None}})] * 2

    def test_errors(self, group):
        """An exception arrives as Ray raises it: with its type, and its traceback as text."""
        with pytest.raises(KeyError, match="here") as caught:
            get_values(group.send("fail", "here"))
        assert "in fail" in str(caught.value)

    def test_items(self, group):
        """Items arrive in order, more of them than may be under way."""
        assert [[item.get() for item in stream] for stream in group.send("items", 1000)] == [list(range(1000))] * 2

    def test_wait(self, group):
        """`wait` returns what is ready, and ends at its timeout."""
        group.gate.clear()
        first = group.send("echo", 1, ranks=[0])
        second = group.send("add", 1, ranks=[1])
        assert wait_ready([*first, *second], num_returns=1, timeout=10) == (first, second)
        assert wait_ready([*first, *second], num_returns=2, timeout=0.05) == (first, second)
        group.gate.set()
        assert wait_ready([*first, *second], num_returns=2, timeout=10) == ([*first, *second], [])

    def test_answers_as_arguments(self, group):
        """A call that gets the answer of another one is sent when that answer has arrived; an error takes its place."""
        group.gate.clear()
        (made,) = group.send("add", 5, ranks=[0])
        waiting = group.send("echo", made, ranks=[1])
        (behind,) = group.send("echo", "behind", ranks=[1])
        assert not behind.done
        group.gate.set()
        assert get_values([*waiting, behind]) == [((5,), {}), (("behind",), {})]
        (failed,) = group.send("fail", "source", ranks=[0])
        with pytest.raises(KeyError, match="source"):
            get_values(group.send("echo", failed, ranks=[1]))

    def test_answers_of_another_lane(self, group, monkeypatch):
        """A call is sent as soon as the answer of another lane that is its argument has arrived."""
        with open_group() as other, monkeypatch.context() as patch:
            look_rarely(patch)
            let_workers_look_rarely(patch)
            other.gate.clear()
            (made,) = other.send("add", 5, ranks=[0])
            sent = group.send("echo", made, ranks=[1])
            threading.Timer(0.5, other.gate.set).start()
            assert get_values(sent, 30) == [((5,), {})]

    def test_dead_source(self, group):
        """The death of the worker that makes an argument does not look like the death of the worker that gets it."""
        source = Message(group.lane, bytes(24))
        sent = group.send("echo", source, ranks=[1])
        source.resolve(error=ActorDiedError())
        with pytest.raises(RayTaskError) as caught:
            get_values(sent)
        assert isinstance(caught.value.cause, ActorDiedError)

    def test_end_while_sending(self, group):
        """A call fails if the worker dies after its connection was found and before the call is queued there."""
        with group.hold():
            sent = group.send("echo", 1, ranks=[0])
            group.lane._by_identity.pop(group.lane._sessions[0].identity).end(ActorDiedError())
        assert wait_ready(sent, timeout=20)[0] == sent
        with pytest.raises(ActorDiedError):
            get_values(sent)

    def test_failing_ray(self, group, monkeypatch):
        """The thread that receives messages goes on when Ray has raised an error there."""
        failed = threading.Event()

        def fail(streams):
            failed.set()
            raise OSError("Ray does not answer")

        with monkeypatch.context() as patch:
            find_ends_by(patch, fail)
            assert failed.wait(20)
        (sent,) = group.send("echo", 1, ranks=[0])
        assert sent.future().result(10) == ((1,), {})

    def test_failing_command(self, group, caplog, eventually):
        """An error of any kind in the lane's thread is logged, and the thread goes on."""
        group.lane._do(lambda: [][0])
        assert eventually(lambda: "could not take a message: IndexError" in caplog.text)
        assert get_values(group.send("echo", 1, ranks=[0]), 20) == [((1,), {})]

    def test_thread_that_frees_references(self, group, monkeypatch, eventually):
        """The lane's own thread keeps `ray.shutdown()` waiting while it looks at the ends of the serve calls."""
        blocked, seen = [], []

        @contextlib.contextmanager
        def block_shutdown():
            blocked.append(True)
            yield
            blocked.pop()

        def find_ended(streams):
            seen.append((threading.current_thread().name, bool(blocked)))
            return {}

        block_shutdown_by(monkeypatch, block_shutdown)
        find_ends_by(monkeypatch, find_ended)
        assert eventually(lambda: len(seen) >= 2)
        assert set(seen) == {("fairlead-lane", True)}

    def test_order_and_detour(self, group):
        """The calls after a detour run after those before it."""
        for i in range(200):
            group.send("add", i)
            if i % 50 == 25:
                with group.lane.detour([0, 1]):
                    pass
        get_values(group.send("echo", 0))
        assert group.ran == [list(range(200))] * 2

    def test_window(self, group):
        """A worker that does not answer gets a bounded number of messages."""
        group.gate.clear()
        sent = [group.send("add", i, ranks=[0])[0] for i in range(3 * WINDOW)]
        session = group.lane._sessions[0]
        with group.hold():
            assert (len(session._calls), session.backlog) == (WINDOW, 2 * WINDOW)
        group.gate.set()
        assert get_values(sent) == list(range(3 * WINDOW))

    def test_room(self, group, monkeypatch):
        """A thread waits while too many calls of a worker wait to be sent, and other threads go on meanwhile."""
        limit_waiting_calls(monkeypatch, 5)
        group.gate.clear()
        sent = [group.send("add", i, ranks=[0])[0] for i in range(WINDOW + 5)]
        with group.hold():
            assert group.lane._sessions[0].backlog == 5
        assert not group.lane.wait_for_room([0, 1], 0.05)
        assert group.lane.wait_for_room([1], 0.0)
        waiting = threading.Thread(target=group.lane.wait_for_room, args=([0], 60.0))
        waiting.start()
        assert get_values(group.send("echo", 1, ranks=[1]), 20) == [((1,), {})]
        assert waiting.is_alive()
        group.gate.set()
        waiting.join(20)
        assert not waiting.is_alive()
        assert get_values(sent) == list(range(WINDOW + 5))

    def test_threads(self, group):
        """Calls of several threads at once all get their own answers."""
        wrong: list = []

        def run(number: int) -> None:
            for i in range(100):
                got = get_values(group.send("echo", number, i))
                wrong.extend(one for one in got if one != ((number, i), {}))

        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong

    def test_reconnect(self, group, eventually, monkeypatch):
        """After the loss of a connection by the network, each call still runs once."""
        send, lost = group.router.send, set()

        def note(identity, message):
            if not (sent := send(identity, message)):
                lost.add(identity)
            return sent

        monkeypatch.setattr(group.router, "send", note)
        for i in range(100):
            group.send("add", i)
            if i % 10 == 5:
                with group.hold():
                    group.router._socket.unbind(group.router.address)
                assert eventually(lambda: _bind_again(group))
        last = group.send("add", 100)
        assert wait_ready(last, num_returns=2, timeout=20)[1] == []
        assert group.ran == [list(range(101))] * 2
        assert lost == {group.lane._sessions[1].identity}

    def test_lost_message(self, group, monkeypatch):
        """A call to a worker without a connection is sent again when the worker has greeted."""
        send, dropped, greeted = group.router.send, [], []
        session = group.lane._sessions[1]

        def drop_first(identity, message):
            if not dropped and group.router._batch is None and identity == session.identity:
                dropped.append(message)
                return False
            return send(identity, message)

        monkeypatch.setattr(group.router, "send", drop_first)
        with group.hold():  # the lane's thread does these one after the other, and takes no message between them
            sent = group.send("add", 1)
            group.lane._do(lambda: greeted.append(session.greeted))
        assert get_values(sent, 20) == [1, 1]
        assert len(dropped) == 1
        assert greeted == [False]
        assert session.greeted
        assert group.ran == [[1]] * 2

    def test_duplicates(self, group):
        """A message that is sent again changes nothing."""
        get_values(group.send("add", 1))
        group.gate.clear()
        sent = group.send("add", 2)
        session = group.lane._sessions[0]
        with group.hold():
            for _, message in [*session._unacked] * 3:
                session.send_frames(session.identity, message)
        group.gate.set()
        get_values([*sent, *group.send("add", 3)])
        assert group.ran == [[1, 2, 3]] * 2

    def test_cancel(self, group):
        """A call that has not been sent is dropped."""
        group.gate.clear()
        sent = [group.send("add", i, ranks=[0])[0] for i in range(WINDOW + 2)]
        sent[-1].cancel()
        group.gate.set()
        get_values(sent[:-1])
        assert sent[-1].failed
        get_values(group.send("echo", 0))
        assert group.ran[0] == list(range(WINDOW + 1))

    def test_cancel_in_the_driver(self, group, monkeypatch):
        """Calls that have not been sent are dropped at once, and make room; workers are asked about the others."""
        asked: list = []

        def ask_nodes(workers, *_, **__):
            asked.extend(workers)
            return [False] * len(workers)

        ask_nodes_by(monkeypatch, ask_nodes)
        group.gate.clear()
        sent = [group.send("add", i, ranks=[0])[0] for i in range(WINDOW + 20)]
        worker = SimpleNamespace(rank=0, key=(0, 0))
        for future in sent[WINDOW - 1 : -1]:
            assert cancel_calls([(worker, future)], in_order=True) == []
        assert len(asked) == 1
        assert [future.done for future in sent] == [False] * WINDOW + [True] * 19 + [False]
        assert group.lane._sessions[0].backlog == 1
        group.gate.set()
        get_values([*sent[:WINDOW], sent[-1]])
        assert group.ran[0] == [*range(WINDOW), WINDOW + 19]

    def test_dropped_stream(self, group):
        """A generator whose caller has dropped the items runs, also if it waited to be sent then."""
        group.gate.clear()
        sent = [group.send("add", i, ranks=[0])[0] for i in range(WINDOW + 1)]
        group.send("items_and_note", 1, ranks=[0])
        (cancelled,) = group.send("items_and_note", 2, ranks=[0])
        cancelled.cancel()
        group.gate.set()
        get_values([*sent, *group.send("echo", 0)])
        assert group.ran[0] == [*range(WINDOW + 1), ("items", 1)]

    @pytest.mark.parametrize("group", [True], indirect=True)
    def test_call_before_the_opening(self, group):
        """A call that another thread makes while the lane opens is answered, and the lane opens."""
        assert get_values([*group.early, *group.send("add", 1)]) == [0, 0, 1, 1]
        assert group.ran == [[0, 1]] * 2


class TestSignals:
    """Handlers of signals raise between two steps of the code, and must not leave a message half-sent or half-read."""

    def test_while_sending(self, group, interrupt_everywhere):
        """After Ctrl-C at any moment at which a call is sent, all workers run it or none, and the later ones."""
        numbers = itertools.count()

        def send():
            with contextlib.suppress(KeyboardInterrupt):
                group.send("add", next(numbers))

        assert interrupt_everywhere(send, signal.SIGINT, "fairlead_lane/_transport.py")
        assert get_values(group.send("add", "last"), 20) == ["last", "last"]
        assert group.ran[0] == group.ran[1]
        assert len(group.ran[0]) > 2

    def test_while_receiving(self, group, interrupt_everywhere):
        """After Ctrl-C at any moment at which an answer is waited for, it can be asked for again."""
        (sent,) = group.send("add", 1, ranks=[0])

        def get():
            group.gate.clear()
            (late,) = other.submit(group.send, "add", 2, ranks=[1]).result(20)
            threading.Timer(0.005, group.gate.set).start()
            with contextlib.suppress(KeyboardInterrupt):
                assert get_values([sent, late], 20) == [1, 2]
            assert other.submit(get_values, [sent, late], 20).result(20) == [1, 2]

        with ThreadPoolExecutor(1) as other:
            assert interrupt_everywhere(get, signal.SIGINT, "fairlead_lane/_transport.py")

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_while_waiting(self, group, number):
        """A signal ends a wait at once, and its handler is the user's afterwards."""

        class Stopped(Exception):
            pass

        def handle(*_):
            raise Stopped

        before = signal.signal(number, handle)
        group.gate.clear()
        sent = group.send("add", 1)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), number))
        timer.start()
        try:
            with pytest.raises(Stopped):
                get_values(sent, 3600)
            assert signal.getsignal(number) is handle
        finally:
            timer.join()
            signal.signal(number, before)
        group.gate.set()
        assert get_values(sent) == [1, 1]


class _Items:
    """A generator of stored answers, none of which has arrived."""

    def next_ready(self) -> bool:
        return False


class TestEnds:
    """What happens to calls when a worker, the lane or Ray ends."""

    def test_answers_before_the_end(self, group):
        """The answers that have arrived are handed out although the worker is dead, also to a caller of one of them."""
        group.gate.clear()
        sent = [group.send("add", i, ranks=[0])[0] for i in range(3)]
        session, receive = group.lane._sessions[0], group.router.receive
        with group.hold():
            group.gate.set()
            messages: list = []
            deadline = time.monotonic() + 20
            while len(messages) < 3 and time.monotonic() < deadline:
                group.router.wait(0.1)
                messages += receive()
            group.router.receive = lambda drains: iter(messages)
            group.lane._ended.append((session, ActorDiedError()))
            group.lane._receive()
            group.router.receive = receive
        assert get_values(sent, 10) == [0, 1, 2]

    def test_answers_behind_a_lost_one(self, group):
        """A small answer that waits behind a large one is handed out when the large one is lost with its worker."""
        with group.hold():
            session = group.lane._sessions[0]
            session.items = _Items()
        group.gate.clear()
        large, small = (group.send("add", i, ranks=[0])[0] for i in range(2))
        (stream,) = group.send("items", 2, ranks=[0])
        with group.hold():
            pendings = list(session._calls.values())
            lost, here = (wire.STORED, ()), (wire.INLINE, [pickle.dumps("content")])
            session._arrived.extend([(pendings[0], wire.VALUE, *lost), (pendings[1], wire.VALUE, *here)])
            session._arrived.extend([(pendings[2], wire.ITEM, *lost), (pendings[2], wire.ITEM, *here)])
            session._calls.clear()
            group.lane._by_identity.pop(session.identity)
            session.end(ActorDiedError())
        assert small.get() == "content"
        for lost in (large, stream.completed()):
            with pytest.raises(ActorDiedError):
                lost.get()
        assert next(stream, None) is None  # and no item without the one before

    def test_call_of_a_closed_lane(self, group):
        """A call of a lane that has been closed is refused, instead of never being answered."""
        group.lane.stop()
        group.lane.close(20)
        with pytest.raises(WorkerGroupError, match="has been closed"):
            group.send("add", 1)

    def test_shutdown_during_a_detour(self, group, eventually):
        """The lane does not close itself while a thread is about to let the workers serve it again."""
        group.site._roster.ending = True
        with group.lane.detour([0, 1]):
            assert eventually(lambda: not group.lane._by_identity)
            assert not eventually(lambda: group.lane._closed, 2 * SLICE_S)
        assert get_values(group.send("add", 1), 20) == [1, 1]

    def test_end_of_ray(self, group, monkeypatch, eventually):
        """The lane's thread drops references only while it keeps other threads from shutting Ray down."""
        blocked, seen = threading.local(), []

        @contextlib.contextmanager
        def block():
            blocked.now = True
            yield
            blocked.now = False

        block_shutdown_by(monkeypatch, block)
        group.gate.clear()
        for future in group.send("add", 1):
            monkeypatch.setattr(future, "resolve", lambda **_: seen.append(getattr(blocked, "now", False)))
        group.site._roster.connected = False
        assert eventually(lambda: group.lane._closed)
        assert eventually(lambda: seen == [True, True])

    def test_late_worker_that_has_left(self, group):
        """The error about a worker that did not follow names it also if it has left the group meanwhile."""
        group.gate.clear()
        group.send("add", 1)
        group.lane.stop()
        left = list(group.members)
        group.members.clear()
        with pytest.raises(LaneError, match=r"did not close within 0\.05 s") as caught:
            group.lane.close(0.05)
        assert caught.value.ranks == (0, 1)
        group.members.extend(left)

    def test_dead_worker_while_opening(self, group, monkeypatch):
        """A worker that is dead is not among those that did not follow in time."""
        with group.hold():
            session = group.lane._sessions[0]
            session.greeted = False
            session.end(ActorDiedError())
            late = group.lane._sessions[1]
            late.greeted = False
            monkeypatch.setattr(type(late), "accept", lambda *_: None)
        group.members.clear()
        with pytest.raises(LaneError, match=r"because 1 worker\(s\) did not follow") as caught:
            group.lane.open(0.05)
        assert caught.value.ranks == (1,)
        monkeypatch.undo()
        late.greeted = True
        group.lane._by_identity.pop(session.identity)


class TestChains:
    """Calls whose arguments are answers that arrive, or fail, in any order."""

    @pytest.mark.parametrize("first", [0, 1])
    def test_stored_argument(self, group, monkeypatch, first):
        """A call is sent at once when the large answer that is its argument is handed out."""
        look_rarely(monkeypatch)
        source = Message(group.lane, bytes(24))
        gives = group.lane._sessions[1 - first]
        gives.hand_out = lambda: source.resolve([pickle.dumps(5)])
        sent = group.send("echo", source, ranks=[first])
        with group.hold():
            group.lane._awaiting.add(gives)
        assert get_values(sent, 20) == [((5,), {})]

    @pytest.mark.parametrize("last", [0, 1])
    def test_failed_arguments(self, group, monkeypatch, last):
        """The failure of an argument reaches the calls of all workers that depend on it at once."""
        look_rarely(monkeypatch)
        source = Message(group.lane, bytes(24))
        (middle,) = group.send("echo", source, ranks=[1 - last])
        (end,) = group.send("echo", middle, ranks=[last])
        source.resolve(error=ActorDiedError())
        group.router.interrupt()
        for future in (middle, end):
            with pytest.raises(RayTaskError):
                get_values([future], 20)

    def test_calls_of_others(self, group):
        """A call that waits for an argument, and those behind it, take no time of the calls of other workers."""
        source, looks = Message(group.lane, bytes(24)), []
        sent = [*group.send("echo", source, ranks=[0]), *group.send("echo", 2, ranks=[0])]
        with group.hold():
            waits = group.lane._sessions[0]
            waits.pump = lambda: looks.append(1) or type(waits).pump(waits)
        for i in range(100):
            get_values(group.send("add", i, ranks=[1]))
        assert len(looks) < 20
        source.resolve([pickle.dumps(1)])
        assert get_values(sent, 20) == [((1,), {}), ((2,), {})]

    def test_cancelled_argument(self, group):
        """The cancellation of a call that waits fails a call that depends on it at once."""
        source = Message(group.lane, bytes(24))
        (made,) = group.send("echo", source, ranks=[0])
        (sent,) = group.send("echo", made, ranks=[1])
        made.cancel()
        assert made.failed
        assert sent.failed
        source.resolve([pickle.dumps(5)])

    def test_two_lanes(self, group, monkeypatch):
        """The answers of two lanes are received as they arrive, whichever of them comes last."""
        with open_group() as other, monkeypatch.context() as patch:
            look_rarely(patch)
            for slow, fast in ((group, other), (other, group)):
                slow.gate.clear()
                sent = [*fast.send("add", 1, ranks=[0]), *slow.send("add", 2, ranks=[0])]
                threading.Timer(0.3, slow.gate.set).start()
                assert get_values(sent, 50) == [1, 2]


class TestReferences:
    def test_items(self, group, monkeypatch):
        """The items of a generator call are references, and its error is raised by the iteration."""
        monkeypatch.setattr(ray, "put", lambda value: ("stored", value))
        monkeypatch.setattr(ray, "is_initialized", lambda: True)  # otherwise nothing is stored
        streams = group.send("items", 3)
        assert [list(references_of(stream)) for stream in streams] == [[("stored", i) for i in range(3)]] * 2

        async def take(stream) -> list:
            return [ref async for ref in references_of(stream)]

        assert asyncio.run(take(group.send("items", 3)[0])) == [("stored", i) for i in range(3)]
        (failed,) = group.send("items_and_fail", ranks=[0])
        refs = references_of(failed)
        assert next(refs) == ("stored", 1)
        with pytest.raises(KeyError, match="after an item"):
            next(refs)
