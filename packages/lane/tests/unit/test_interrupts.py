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

import pytest

pytest.importorskip("zmq")

from ..lanes import (
    Handle,
    RepeatedCall,
    Resources,
    find_ends_by,
    get_values,
    is_free,
    look_for_ends_every,
    make_calling_sender,
    make_order,
    open_lane,
)

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)

# Each way in a process of its own, because the process may hang for good. They run at the same time.
WAYS = """
import faulthandler, gc, os, signal, sys, threading, traceback
import pytest
sys.path.insert(0, sys.argv[1])
from lanes import find_ends_by, get_values, open_group

find_ends_by(pytest.MonkeyPatch(), lambda streams: {})
gc.disable()


def call_in(way):
    with open_group() as group:
        wait, acts, answers, called = group.router.wait, [way], [], threading.Event()

        def call(*_):
            made = group.send("echo", 2)
            # A finalizer that interrupts the lane's thread cannot wait there.
            answers.extend([] if way == "finalizer" else get_values(made, 60))
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
        assert get_values(sent, 60) == [1]
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
            get_values(sent, 20)
        timer.join()
        assert delivered == ["SIGTERM"]
        group.gate.set()

    def test_handler_of_the_system(self, group, tmp_path):
        """`faulthandler.register` works after a call as before."""
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        try:
            with open(tmp_path / "stacks", "w") as file:
                faulthandler.register(signal.SIGTERM, file, chain=True)
                get_values(group.send("echo", 1), 20)
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
    def calling_sender(self):
        """Return a sender whose calls are sent to nobody."""
        return make_calling_sender()

    def test_sending(self, calling_sender, other, interrupt_everywhere):
        """After Ctrl-C at any moment of a call another thread can make one."""

        order = make_order()

        def send():
            with contextlib.suppress(KeyboardInterrupt):
                calling_sender.send(order)
            assert other.submit(is_free, calling_sender.membership).result(60)

        assert interrupt_everywhere(send, signal.SIGINT, "_calls/sender.py", "_membership/roster.py")

    def test_opening_and_closing(self, sender, other, interrupt_everywhere):
        """After Ctrl-C at any moment at which a lane opens or closes another thread can make a call."""

        def open_and_close():
            with contextlib.suppress(KeyboardInterrupt), open_lane(sender, Resources(), 5):
                pass
            assert other.submit(is_free, sender.membership).result(60)

        assert interrupt_everywhere(open_and_close, signal.SIGINT, "_calls/route.py")

    def test_repeating(self, calling_sender, other, interrupt_everywhere):
        """After Ctrl-C at any moment at which a call is repeated another thread can wait for the call."""
        call = RepeatedCall(calling_sender)

        def repeat():
            with contextlib.suppress(KeyboardInterrupt):
                assert call.repeat()
            assert other.submit(call.repeat, 0.0).result(60)

        assert interrupt_everywhere(repeat, signal.SIGINT, "_calls/execution.py")


class TestDetour:
    """Ctrl-C in a call that leaves the lane."""

    def test_interrupted_in_ray(self, group, monkeypatch):
        """The lane works and closes after Ctrl-C in the request for a serve call, which Ray has not sent."""
        with monkeypatch.context() as patch:
            patch.setattr(Handle, "remote", lambda handle, *_: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt), group.lane.detour([0]):
                pass
        assert get_values(group.send("add", 1), 20) == [1, 1]
        group.lane.stop()
        group.lane.close(5)

    def test_interrupted(self, group, monkeypatch, interrupt_everywhere):
        """All workers run the calls that are made after Ctrl-C at any moment of such a call, and all in one order."""

        def find_ended(streams):
            return {at: None for at, stream in enumerate(streams) if stream.ended.done()}

        look_for_ends_every(monkeypatch, 0.05)
        find_ends_by(monkeypatch, find_ended)
        numbers = itertools.count()

        def leave():
            with contextlib.suppress(KeyboardInterrupt), group.lane.detour([0, 1]):
                pass
            number = next(numbers)
            sent = other.submit(group.send, "add", number).result(20)
            assert other.submit(get_values, sent, 20).result(20) == [number, number]

        with ThreadPoolExecutor(1) as other:
            assert interrupt_everywhere(leave, signal.SIGINT, "fairlead_lane/_transport.py")
        assert group.ran == [list(range(next(numbers)))] * 2
