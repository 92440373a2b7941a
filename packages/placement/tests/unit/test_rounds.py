# SPDX-License-Identifier: Apache-2.0
"""Work at intervals on a thread, pure."""

import sys
import threading

import pytest

from fairlead_placement.spi import Rounds, block_shutdown


class Work:
    """Three items of work, of which each round does one."""

    def __init__(self):
        self.left = 3
        self.done = threading.Event()
        self.may_begin = threading.Event()
        self.may_begin.set()
        self.rounds = Rounds("fairlead-test", 0.001, self.work, lambda: self.left > 0, exit_s=30.0)

    def work(self):
        assert self.may_begin.wait(30)
        self.left -= 1
        if self.left <= 0:
            self.done.set()

    def threads(self):
        return [thread for thread in threading.enumerate() if thread.name == "fairlead-test"]

    def wait(self):
        for thread in self.threads():
            thread.join(timeout=30)
        assert self.threads() == []


@pytest.fixture
def work():
    """Work whose thread ends with the test."""
    made = Work()
    yield made
    made.rounds.close()
    made.wait()


def test_until_nothing_is_left(work):
    """One thread does all work and ends; work that comes later gets another thread."""
    assert work.threads() == []
    for _ in range(2):
        work.may_begin.clear()
        work.rounds.start()
        work.rounds.start()
        assert len(work.threads()) == 1
        work.may_begin.set()
        assert work.done.wait(30)
        work.wait()
        assert work.left == 0
        work.left = 3
        work.done.clear()


def test_close(work):
    """The end waits for a round that is under way, during which Ray may be shut down, and no other begins."""
    begun, blocked = threading.Event(), threading.Event()

    def one_round():
        begun.set()
        assert work.rounds._end.wait(30)
        with block_shutdown():
            blocked.set()
        work.left -= 1

    work.rounds._work = one_round
    work.rounds.start()
    assert begun.wait(30)
    with block_shutdown():
        threading.Thread(target=work.rounds.close).start()
        assert not blocked.wait(0.05)
    work.wait()
    assert (blocked.is_set(), work.left) == (True, 2)
    work.rounds.start()
    assert work.threads() == []


def test_ray_is_shut_down_in_a_round(work):
    """The thread continues with what is left after a round that another thread's `ray.shutdown()` has ended."""
    ends = iter([True, False, False, False])

    def one_round():
        if next(ends):
            sys.exit(0)  # what Ray's waits raise then
        work.work()

    work.rounds._work = one_round
    work.rounds.start()
    assert work.done.wait(30)
    work.wait()
    assert work.left == 0


def test_end_is_waited_for_only_so_long():
    """A round that does not end delays the exit for the given time and no longer."""
    begun, go_on = threading.Event(), threading.Event()

    def work():
        begun.set()
        go_on.wait(30)

    stuck = Rounds("fairlead-stuck", 0.001, work, lambda: False, exit_s=0.05)
    stuck.start()
    assert begun.wait(30)
    stuck.close()
    assert [thread.name for thread in threading.enumerate()].count("fairlead-stuck") == 1
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "fairlead-stuck":
            thread.join(timeout=30)
