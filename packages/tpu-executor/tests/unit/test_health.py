# SPDX-License-Identifier: Apache-2.0
"""When Ray's head counts as unreachable, with a clock that the test turns."""

import signal
from types import SimpleNamespace

import pytest

from fairlead_placement.extension import Job
from fairlead_tpu_executor import HeadUnreachableError, _health
from fairlead_tpu_executor._health import Head


def test_interrupted_twice(monkeypatch):
    """A second interrupt ends the wait for a request, which is reversed when it returns (seam: whether Ray runs)."""
    monkeypatch.setattr(_health.ray, "is_initialized", lambda: True)
    job, undone = Job(0.0), []
    job.over = SimpleNamespace(wait=lambda timeout_s: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        Head(60.0, probe=lambda _: True).result(job, undo=undone.append)
    job.future.set_result("slices")
    assert undone == ["slices"]


def test_probes():
    """The deadline counts from the first probe without an answer; an answer or a long gap resets it."""
    now, answers = [0.0], [True]
    head = Head(5.0, probe=lambda _: answers[0], clock=lambda: now[0])
    for now[0] in (1.0, 2.0):
        head.check()
    answers[0] = False
    for now[0] in (3.0, 5.0, 7.0):
        head.check()
    answers[0], now[0] = True, 8.0
    head.check()
    answers[0] = False
    for now[0] in (9.0, 13.0):
        head.check()
    now[0] = 14.0
    with pytest.raises(HeadUnreachableError, match=r"has not answered for 5\.0 s"):
        head.check()
    now[0] = 100.0
    head.check()
