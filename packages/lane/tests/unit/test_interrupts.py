# SPDX-License-Identifier: Apache-2.0
"""Tests of what runs in the middle of a call: handlers of signals, finalizers and callbacks, without Ray."""

import contextlib
import faulthandler
import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("zmq")

from fairlead_workergroup._calls.execution import Execution
from fairlead_workergroup._calls.plan import CallOptions
from fairlead_workergroup._calls.sender import Order, Request, Sender, Sent
from fairlead_workergroup._membership.machine import Membership
from fairlead_workergroup._membership.operations import Route
from fairlead_workergroup._transport import futures as futures_of
from fairlead_workergroup._world import Deadline

from ..lanes import Handle, Resources, open_lane

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)

# Each way in a process of its own, because the process may hang for good. They run at the same time.
WAYS = """
import faulthandler, gc, os, signal, sys, threading, traceback
sys.path.insert(0, sys.argv[1])
from fairlead_workergroup._transport import futures as futures_of
from fairlead_lane import _transport as transport
from lanes import open_group

transport.find_ended = lambda streams: {}
gc.disable()


def call_in(way):
    with open_group() as group:
        wait, acts, answers, called = group.router.wait, [way], [], threading.Event()

        def call(*_):
            made = group.send("echo", 2)
            # A finalizer that interrupts the lane's thread cannot wait there.
            answers.extend([] if way == "finalizer" else futures_of.get(made, 60))
            called.set()
            group.gate.set()

        class Finalized:
            __del__ = call

        def wait_and_collect(timeout_s):
            if acts:
                acts.clear()
                one = Finalized()
                one.itself = one
                del one
                gc.collect()
            return wait(timeout_s)

        signal.signal(signal.SIGUSR1, call)
        if way == "finalizer":
            group.router.wait = wait_and_collect
        group.gate.clear()
        sent = group.send("add", 1, ranks=[1])
        if way == "callback":
            group.send("total", "a", ranks=[0])[0].future().add_done_callback(lambda _: group.gate.set() or call())
        if way == "handler":
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            threading.Timer(0.4, group.gate.set).start()
        faulthandler.dump_traceback_later(60.0, exit=True)
        assert futures_of.get(sent, 60) == [1]
        called.wait()
        assert way == "finalizer" or answers == [((2,), {})] * 2
        os._exit(0)


children = {}
for way in sys.argv[2:]:
    if not (pid := os.fork()):
        try:
            call_in(way)
        except BaseException:
            traceback.print_exc()
        os._exit(2)
    children[pid] = way
while children:
    pid, status = os.wait()
    print(children.pop(pid), os.waitstatus_to_exitcode(status))
"""


@pytest.fixture(scope="module")
def ends() -> dict[str, str]:
    """Return how the process of each way has ended: 0 if its calls were answered, 1 if it hung."""
    command = [sys.executable, "-c", WAYS, str(Path(__file__).parents[1]), "handler", "finalizer", "callback"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    found = dict(line.split() for line in done.stdout.splitlines())
    assert set(found.values()) <= {"0", "1"}, done.stderr
    return found


@pytest.mark.parametrize("way", ["handler", "finalizer", "callback"])
def test_call_in_the_middle_of_a_wait(ends, way):
    """A handler of a signal, a finalizer or a callback may make a call while its thread waits for an answer."""
    assert ends[way] == "0"


class TestHandlers:
    """The handlers of signals, and what the system does at a signal, are the same before and after a call."""

    @pytest.fixture
    def alarm(self) -> Iterator[type[Exception]]:
        """Yield an exception that the handler of SIGALRM raises."""

        class Alarm(Exception):
            pass

        def ring(*_):
            raise Alarm

        before = {number: signal.getsignal(number) for number in HANDLED}
        signal.signal(signal.SIGALRM, ring)
        yield Alarm
        for number, handler in before.items():
            signal.signal(number, handler)

    def test_alarm_at_any_moment(self, group, alarm, interrupt_everywhere):
        """A handler that raises at any moment of a call leaves the handlers as they were."""
        before = [signal.getsignal(number) for number in HANDLED]

        def call():
            with contextlib.suppress(alarm):
                group.send("echo", 1)
            assert [signal.getsignal(number) for number in HANDLED] == before

        assert interrupt_everywhere(call, signal.SIGALRM, "fairlead_lane/_transport.py")

    def test_two_signals_in_a_call(self, group, alarm):
        """Each signal that arrives in the middle of a call reaches its handler, even if another handler raises."""
        delivered = []
        signal.signal(signal.SIGTERM, lambda *_: delivered.append("SIGTERM"))
        group.gate.clear()
        sent = group.send("add", 1)

        def signal_twice():
            with group.hold():  # Python sees both at the same moment
                [
                    signal.pthread_kill(threading.main_thread().ident, number)
                    for number in (signal.SIGALRM, signal.SIGTERM)
                ]

        timer = threading.Timer(0.2, signal_twice)
        timer.start()
        with pytest.raises(alarm):
            futures_of.get(sent, 20)
        timer.join()
        assert delivered == ["SIGTERM"]
        group.gate.set()

    def test_handler_of_the_system(self, group, tmp_path):
        """`faulthandler.register` works after a call as before."""
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        try:
            with open(tmp_path / "stacks", "w") as file:
                faulthandler.register(signal.SIGTERM, file, chain=True)
                futures_of.get(group.send("echo", 1), 20)
                signal.raise_signal(signal.SIGTERM)
            assert "most recent call first" in (tmp_path / "stacks").read_text()
        finally:
            faulthandler.unregister(signal.SIGTERM)
            signal.signal(signal.SIGTERM, before)


class TestTurns:
    """Ctrl-C at any moment of a call releases the locks that other threads need for their calls."""

    @pytest.fixture
    def other(self) -> Iterator[ThreadPoolExecutor]:
        """Yield a thread other than the one that is interrupted."""
        with ThreadPoolExecutor(1) as pool:
            yield pool

    @pytest.fixture
    def whole_sender(self, sender):
        """Return a sender whose calls are sent to nobody."""
        echo = SimpleNamespace(remote=lambda *args, **kwargs: object())
        member = SimpleNamespace(handle=SimpleNamespace(echo=echo))
        now = SimpleNamespace(
            lost=(), sharding=None, members=[member], epoch=0, is_broken=False, ended=False, has=lambda ranks: True
        )
        sender.roster.check_alive = lambda: now
        sender.roster.now = now
        sender.roster.check_connected = lambda: None
        described = SimpleNamespace(worker_class=SimpleNamespace(concurrent=False))
        counters = SimpleNamespace(add=lambda **counts: None)
        return Sender(sender.roster, described, sender.membership, counters, None, None)

    @pytest.fixture
    def order(self) -> Order:
        """Return a call of rank 0."""
        method = SimpleNamespace(name="echo", result="value")
        return Order(method, [0], [Request("echo", [], {})], 0.0, Deadline(), (0, 0), ())

    def _is_free(self, membership: Membership) -> bool:
        """Return whether this thread can make a call, and change the group."""
        deadline = Deadline.after(20)
        is_open = membership.gate.run(lambda: True, deadline)
        return is_open and membership.begin(Route("nothing", lambda gate: None)).wait(deadline)

    def test_sending(self, whole_sender, order, other, interrupt_everywhere):
        """After Ctrl-C at any moment of a call another thread can make one."""

        def send():
            with contextlib.suppress(KeyboardInterrupt):
                whole_sender.send(order)
            assert other.submit(self._is_free, whole_sender.membership).result(60)

        assert interrupt_everywhere(send, signal.SIGINT, "_calls/sender.py", "_membership/roster.py")

    def test_opening_and_closing(self, sender, other, interrupt_everywhere):
        """After Ctrl-C at any moment at which a lane opens or closes another thread can make a call."""

        def open_and_close():
            with contextlib.suppress(KeyboardInterrupt), open_lane(sender, Resources(), 5):
                pass
            assert other.submit(self._is_free, sender.membership).result(60)

        assert interrupt_everywhere(open_and_close, signal.SIGINT, "_calls/route.py")

    def test_repeating(self, whole_sender, order, other, interrupt_everywhere):
        """After Ctrl-C at any moment at which a call is repeated another thread can wait for the call."""
        execution = Execution(whole_sender, None, order, Sent([], 0, 0), [], CallOptions(retries=1))
        execution.pending = list

        def repeat():
            with contextlib.suppress(KeyboardInterrupt):
                assert execution.repeat(-1, Deadline())
            assert other.submit(execution.repeat, -1, Deadline.after(0.0)).result(60)

        assert interrupt_everywhere(repeat, signal.SIGINT, "_calls/execution.py")


class TestDetour:
    """Ctrl-C in a call that leaves the lane."""

    def test_interrupted_in_ray(self, group, monkeypatch):
        """The lane works and closes after Ctrl-C in the request for a serve call, which Ray has not sent."""
        with monkeypatch.context() as patch:
            patch.setattr(Handle, "remote", lambda handle, *_: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt), group.lane.detour([0]):
                pass
        assert futures_of.get(group.send("add", 1), 20) == [1, 1]
        group.lane.stop()
        group.lane.close(5)

    def test_interrupted(self, group, monkeypatch, interrupt_everywhere):
        """All workers run the calls that are made after Ctrl-C at any moment of such a call, and all in one order."""

        def find_ended(streams):
            return {at: None for at, stream in enumerate(streams) if stream.ended.done()}

        monkeypatch.setattr("fairlead_lane._transport.CHECK_S", 0.05)
        monkeypatch.setattr("fairlead_lane._transport.find_ended", find_ended)
        numbers = itertools.count()

        def leave():
            with contextlib.suppress(KeyboardInterrupt), group.lane.detour([0, 1]):
                pass
            number = next(numbers)
            sent = other.submit(group.send, "add", number).result(20)
            assert other.submit(futures_of.get, sent, 20).result(20) == [number, number]

        with ThreadPoolExecutor(1) as other:
            assert interrupt_everywhere(leave, signal.SIGINT, "fairlead_lane/_transport.py")
        assert group.ran == [list(range(next(numbers)))] * 2
