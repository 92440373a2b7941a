# SPDX-License-Identifier: Apache-2.0
"""Tests of the events that threads wait for."""

import contextlib
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

from fairlead_placement.extension import OneTimeEvent


def test_interrupted_waits(interrupter):
    """Ctrl-C at any moment of a wait for an event raises KeyboardInterrupt only, and others can wait and set it."""

    moments = 0
    with ThreadPoolExecutor(1) as other:
        while True:
            event = OneTimeEvent()
            threading.Timer(0.002, event.set).start()
            with (
                contextlib.suppress(KeyboardInterrupt),
                interrupter(signal.SIGINT, ("background.py", "threading.py"), moments) as interruption,
            ):
                assert event.wait(20)
            assert other.submit(event.wait, 20).result(30)
            if not interruption.has_raised:
                break
            moments += 1
    assert moments


def test_waits():
    """A wait ends at its timeout, and for all threads when the event happens."""
    event = OneTimeEvent()
    assert not event.wait(0.01)
    assert not event.is_set()
    with ThreadPoolExecutor(8) as threads:
        waits = [threads.submit(event.wait, 20) for _ in range(8)]
        event.set()
        assert all(one.result(30) for one in waits)
    assert event.wait(0.0)
    assert event.wait()
