# SPDX-License-Identifier: Apache-2.0
"""Tests of what runs in the middle of a call: handlers of signals, finalizers and callbacks, without Ray."""

import contextlib
import faulthandler
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

from fairlead_workergroup import _futures as futures_of
from fairlead_workergroup._calls.execution import Execution
from fairlead_workergroup._calls.lane import open_lane
from fairlead_workergroup._calls.plan import CallOptions
from fairlead_workergroup._calls.sender import Order, Request, Sender, Sent
from fairlead_workergroup._deadline import Deadline
from fairlead_workergroup._membership.machine import Membership
from fairlead_workergroup._membership.operations import Route

from ..interrupts import interrupt_everywhere
from ..lanes import Handle, Resources

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)

# Each way in a process of its own, because the process may hang for good. They run at the same time.
WAYS = """
import faulthandler, gc, os, signal, sys, threading, traceback
sys.path.insert(0, sys.argv[1])
from fairlead_workergroup import _futures as futures_of
from fairlead_workergroup._lane import lane
from lanes import open_group

lane.find_ended = lambda streams: {}
gc.disable()


def call_in(way):
    with open_group() as group:
        wait, me, acts, made, called = group.router.wait, threading.get_ident(), [way], [], threading.Event()

        def call(*_):
            made.extend(group.send("echo", 2))
            called.set()

        class Finalized:
            __del__ = call

        def act_and_wait(timeout_s):
            # What may happen at any moment happens while this thread waits for messages.
            if acts and threading.get_ident() == me:
                acts.clear()
                group.gate.set()
                if way == "handler":
                    signal.raise_signal(signal.SIGUSR1)
                elif way == "finalizer":
                    one = Finalized()
                    one.itself = one
                    del one
                    gc.collect()
            return wait(timeout_s)

        signal.signal(signal.SIGUSR1, call)
        group.router.wait = act_and_wait
        group.gate.clear()
        sent = group.send("add", 1)
        if way == "callback":
            sent[0].future().add_done_callback(call)
            group.gate.set()
        faulthandler.dump_traceback_later(3.0, exit=True)
        assert futures_of.get(sent, 60) == [1, 1]
        called.wait()
        assert futures_of.get(made, 60) == [((2,), {})] * 2
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


@pytest.mark.xfail(strict=True, reason="a 1: a thread that holds the lane's socket runs user code and waits for itself")
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

    @pytest.mark.xfail(strict=True, reason="a 2: a handler that raises leaves the handlers of other signals replaced")
    def test_alarm_at_any_moment(self, group, alarm):
        """A handler that raises at any moment of a call leaves the handlers as they were."""
        before = [signal.getsignal(number) for number in HANDLED]

        def call():
            with contextlib.suppress(alarm):
                group.send("echo", 1)
            assert [signal.getsignal(number) for number in HANDLED] == before

        assert interrupt_everywhere(call, signal.SIGALRM, "_lane/signals.py")

    @pytest.mark.xfail(strict=True, reason="a 2: the exception of one handler drops the signals that arrived after it")
    def test_two_signals_in_a_call(self, group, alarm):
        """Each signal that arrives in the middle of a call reaches its handler, even if another handler raises."""
        delivered = []
        signal.signal(signal.SIGTERM, lambda *_: delivered.append("SIGTERM"))
        with pytest.raises(alarm), group.lane._hold():
            [signal.raise_signal(number) for number in (signal.SIGALRM, signal.SIGTERM)]
        assert delivered == ["SIGTERM"]

    @pytest.mark.xfail(strict=True, reason="a 3: a call removes handlers of signals that Python did not install")
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
        member = SimpleNamespace(method=lambda name: SimpleNamespace(remote=lambda *args, **kwargs: object()))
        now = SimpleNamespace(
            lost=(), sharding=None, members=[member], epoch=0, is_broken=False, ended=False, has=lambda ranks: True
        )
        sender.roster.check_alive = lambda: now
        sender.roster.direct = lambda ranks: contextlib.nullcontext()
        sender.roster.snapshot = lambda: now
        sender.roster.check_connected = lambda: None
        launcher = SimpleNamespace(worker_class=SimpleNamespace(concurrent=False))
        counters, log = SimpleNamespace(add=lambda **counts: None), SimpleNamespace(begin=lambda *entry: 0)
        return Sender(sender.roster, launcher, sender.membership, counters, log, lambda error: None, None)

    @pytest.fixture
    def order(self) -> Order:
        """Return a call of rank 0."""
        method = SimpleNamespace(name="echo", result="value")
        return Order(method, [0], [Request("echo", [], {})], 0.0, Deadline(), {}, ())

    def _is_free(self, membership: Membership) -> bool:
        """Return whether this thread can make a call, and change the group."""
        deadline = Deadline.after(20)
        is_open = membership.gate.run(lambda: True, deadline)
        return is_open and membership.begin(Route("nothing", lambda gate: None)).wait(deadline)

    def test_sending(self, whole_sender, order, other):
        """After Ctrl-C at any moment of a call another thread can make one."""

        def send():
            with contextlib.suppress(KeyboardInterrupt):
                whole_sender.send(order)
            assert other.submit(self._is_free, whole_sender.membership).result(60)

        assert interrupt_everywhere(send, signal.SIGINT, "_calls/sender.py", "_membership/gate.py")

    def test_opening_and_closing(self, sender, other):
        """After Ctrl-C at any moment at which a lane opens or closes another thread can make a call."""

        def open_and_close():
            with contextlib.suppress(KeyboardInterrupt), open_lane(sender, Resources(), 5):
                pass
            assert other.submit(self._is_free, sender.membership).result(60)

        assert interrupt_everywhere(open_and_close, signal.SIGINT, "_calls/lane.py")

    def test_repeating(self, whole_sender, order, other):
        """After Ctrl-C at any moment at which a call is repeated another thread can wait for the call."""
        execution = Execution(whole_sender, None, order, Sent([], 0, 0), [], CallOptions(retries=1))
        execution.pending = list

        def repeat():
            with contextlib.suppress(KeyboardInterrupt):
                assert execution.repeat(-1)
            assert other.submit(execution.repeat, -1, Deadline.after(0.0)).result(60)

        assert interrupt_everywhere(repeat, signal.SIGINT, "_calls/attempts.py")


class TestDetour:
    """Ctrl-C in a call that leaves the lane."""

    @pytest.mark.xfail(strict=True, reason="a 5: a session that is stopping takes later calls, which are lost")
    @pytest.mark.parametrize("moment", ["the workers end the lane", "the workers serve it again"])
    def test_interrupted(self, group, monkeypatch, moment):
        """All workers run the calls that are made after Ctrl-C in the middle of such a call."""
        monkeypatch.setattr("fairlead_workergroup._lane.lane.CHECK_S", 0.05)

        def find_ended(streams):
            return {at: None for at, stream in enumerate(streams) if stream.ended.done()}

        def interrupt_once(owner, name):
            """Let Ctrl-C arrive in a function when the main thread calls it for the first time."""
            function = getattr(owner, name)

            def interrupted(*args):
                if threading.current_thread() is threading.main_thread():
                    monkeypatch.setattr(owner, name, function)
                    signal.raise_signal(signal.SIGINT)
                return function(*args)

            monkeypatch.setattr(owner, name, interrupted)

        monkeypatch.setattr("fairlead_workergroup._lane.lane.find_ended", find_ended)
        assert futures_of.get(group.send("add", 1), 20) == [1, 1]
        if moment == "the workers end the lane":
            interrupt_once(group.lane._sessions[0], "send_frames")
        else:
            interrupt_once(Handle, "remote")
        with pytest.raises(KeyboardInterrupt), group.lane.detour([0, 1]):
            pass
        assert futures_of.get(group.send("add", 2), 20) == [2, 2]
        assert group.ran == [[1, 2]] * 2


class TestSocket:
    @pytest.mark.xfail(strict=True, reason="a 12: a thread that has sent a call does not wake those that receive")
    def test_waiting_for_the_socket(self, group, monkeypatch, eventually):
        """A thread that lets go of the socket wakes those that wait for it, instead of letting them wait on."""
        woke = []

        class Changed(threading.Condition):
            def notify_all(self):
                woke.append(threading.current_thread())
                super().notify_all()

        monkeypatch.setattr(group.lane, "_changed", Changed())
        enough = threading.Event()
        waiting = threading.Thread(target=group.lane.run, args=(enough.is_set, 60.0))
        with monkeypatch.context() as patch:
            patch.setattr("fairlead_workergroup._lane.lane.FOLLOW_S", 60.0)
            patch.setattr("fairlead_workergroup._lane.lane.SLICE_S", 60.0)
            with group.lane._hold():
                waiting.start()
                assert eventually(lambda: group.lane._followers)
            awakened = threading.current_thread() in woke
        enough.set()
        while waiting.is_alive():
            group.lane._notify()
            group.lane._interrupt()
            waiting.join(0.1)
        assert awakened
