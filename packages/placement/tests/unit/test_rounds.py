# SPDX-License-Identifier: Apache-2.0
"""Work at intervals on a background thread, without Ray."""

import gc
import os
import sys
import threading
import time
import weakref

import pytest

from fairlead_placement._nodes import rounds as module
from fairlead_placement._ray_private import block_shutdown
from fairlead_placement.extension import Rounds, wait_until


def is_active(rounds):
    """Return whether a round is to begin or under way."""
    return rounds in module._active


class Work:
    """Three items of work, of which each round does one."""

    def __init__(self):
        self.left = 3
        self.at_once = self.most_at_once = 0
        self.threads = set()
        self.done = threading.Event()
        self.may_begin = threading.Event()
        self.may_begin.set()
        self.rounds = Rounds(0.001, self.work, lambda: self.left > 0, exit_s=30.0)

    def work(self):
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        assert self.may_begin.wait(30)
        self.threads.add(threading.current_thread().name)
        self.left -= 1
        self.at_once -= 1
        if self.left <= 0:
            self.done.set()

    def wait(self):
        assert wait_until(lambda: not is_active(self.rounds), time.monotonic() + 30)


@pytest.fixture
def work():
    """Work that ends with the test."""
    made = Work()
    yield made
    made.rounds.close()


def test_until_nothing_is_left(work):
    """One round after another does all work, however often they are started; work that comes later is done too."""
    for _ in range(2):
        work.may_begin.clear()
        work.rounds.start()
        work.rounds.start()
        assert is_active(work.rounds)
        work.may_begin.set()
        assert work.done.wait(30)
        work.wait()
        assert work.left == 0
        work.left = 3
        work.done.clear()
    assert work.most_at_once == 1
    assert work.threads == {"fairlead-io"}


def test_a_slow_round():
    """A round that takes its time does not delay those of others."""
    go_on, begun = threading.Event(), threading.Event()
    slow = Rounds(0.0, lambda: go_on.wait(30), lambda: False, exit_s=30.0)
    quick = Rounds(0.0, begun.set, lambda: False, exit_s=30.0)
    slow.start()
    quick.start()
    assert begun.wait(30)
    go_on.set()
    assert slow.close(30)


def test_close(work):
    """The end waits for a round that is under way, during which Ray may be shut down, and no other begins."""
    begun, blocked, closed = threading.Event(), threading.Event(), []

    def one_round():
        begun.set()
        assert wait_until(lambda: work.rounds.closed, time.monotonic() + 30)
        with block_shutdown():
            blocked.set()
        work.left -= 1

    rounds = work.rounds = Rounds(0.001, one_round, lambda: work.left > 0, exit_s=30.0)
    rounds.start()
    assert begun.wait(30)
    with block_shutdown():
        closing = threading.Thread(target=lambda: closed.append(rounds.close(30)))
        closing.start()
        assert not blocked.wait(0.05)
    closing.join(30)
    work.wait()
    assert (blocked.is_set(), work.left, closed) == (True, 2, [True])
    rounds.start()
    assert not is_active(rounds)


def test_close_in_a_round():
    """A round may close its own rounds; it does not wait for itself."""
    closed = threading.Event()
    rounds = Rounds(0.0, lambda: rounds.close() and closed.set(), lambda: True, exit_s=30.0)
    rounds.start()
    assert closed.wait(30)
    assert wait_until(lambda: not is_active(rounds), time.monotonic() + 30)


def test_ray_is_shut_down_in_a_round(work, caplog):
    """What is left is done after a round that another thread's `ray.shutdown()` has ended, or that has failed."""
    ends = iter([lambda: sys.exit(0), lambda: 1 // 0])  # Ray's waits raise the first then

    def one_round():
        next(ends, work.work)()

    rounds = Rounds(0.001, one_round, lambda: work.left > 0, exit_s=30.0)
    rounds.start()
    assert work.done.wait(30)
    assert work.left == 0
    (record,) = caplog.records
    assert record.exc_info[0] is ZeroDivisionError


def test_end_is_waited_for_only_so_long():
    """A round that does not end delays the end for the given time and no longer."""
    begun, go_on = threading.Event(), threading.Event()

    def work():
        begun.set()
        go_on.wait(30)

    stuck = Rounds(0.001, work, lambda: False, exit_s=0.05)
    stuck.start()
    assert begun.wait(30)
    assert not stuck.close(0.05)
    go_on.set()
    assert stuck.close(30)


def test_memory():
    """Rounds that are over are not kept alive."""
    begun = threading.Event()
    rounds = Rounds(0.001, begun.set, lambda: False, exit_s=30.0)
    gone = weakref.ref(rounds)
    rounds.start()
    assert begun.wait(30)
    del rounds
    assert wait_until(lambda: gc.collect() >= 0 and gone() is None, time.monotonic() + 30)


def test_in_a_fork():
    """A fork does its own rounds."""
    Rounds(0.0, lambda: None, lambda: False, exit_s=30.0).start()
    child = os.fork()
    if child == 0:
        done = threading.Event()
        Rounds(0.0, done.set, lambda: False, exit_s=30.0).start()
        os._exit(0 if done.wait(30) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
