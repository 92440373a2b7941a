# SPDX-License-Identifier: Apache-2.0
"""The log of the calls of a driver, as an agent reads it, without Ray."""

import os
import socket

import pytest

from fairlead_inspect import _requests
from fairlead_inspect._remote.outside import read_requests
from fairlead_workergroup.spi import start_tick


@pytest.fixture
def tasks(monkeypatch):
    """Let tasks stand for the futures of calls."""
    monkeypatch.setattr(_requests, "task_of_future", lambda task: task)


def requests_of(group):
    """Return the entries of the log of a group, as an agent reads them."""
    return read_requests(os.getpid(), start_tick(os.getpid()), socket.gethostname(), group)


def test_a_repetition_ends_in_the_log(tasks):
    """A call that is repeated on some of its workers is a second entry, which ends when the call ends."""
    first, second, again = (b"first   ", b"second  ", b"again   ")
    log = _requests.RequestLog("test", None)
    lost = log.begin("train", 1.0, [first, second])
    log.end([lost], failed=True)
    repeated = log.begin("train", 1.0, [again])
    log.end([lost, repeated])
    began, other = requests_of("test")
    assert [(entry[2], entry[3], entry[5]) for entry in (began, other)] == [
        (True, 2, [b"first   ", b"second  "]),
        (False, 1, [b"again   "]),
    ]
    assert began[0] < began[1] <= other[1]


def test_a_moment_in_the_log():
    """Something that has gone wrong has one time, which tells it from a call; the end of no call changes nothing."""
    log = _requests.RequestLog("moments", None)
    log.end([0])
    log.mark("rank 1 lost: killed")
    ((began, ended, failed, workers, method, _),) = requests_of("moments")
    assert 0 < began == ended
    assert (failed, workers, method) == (True, 0, "rank 1 lost: killed")


def test_an_entry_that_was_replaced(tasks):
    """The end of a call whose entry has been overwritten by later calls is not noted; that of the latest is."""
    log = _requests.RequestLog("replaced", None)
    entries = [log.begin(f"step_{at}", 1.0, [bytes(8)]) for at in range(_requests.KEPT + 2)]
    log.end(entries[:3])
    shown = requests_of("replaced")
    assert len(shown) == _requests.KEPT
    assert [entry[4] for entry in shown if entry[1]] == ["step_2"]
