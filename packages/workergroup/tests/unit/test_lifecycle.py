# SPDX-License-Identifier: Apache-2.0
"""What happens at the start and at the end of a group, without Ray."""

from types import SimpleNamespace

import pytest

from fairlead_workergroup import WorkerStartError
from fairlead_workergroup._lifecycle import resources
from fairlead_workergroup._lifecycle.resources import Resources
from fairlead_workergroup._observe import requests
from fairlead_workergroup._start import launch
from fairlead_workergroup._start.launch import wait_started


def test_the_first_failure_is_reported(monkeypatch):
    """If a worker fails and its peers fail because of it a moment later, the error names the first one."""
    ends = {"ref of rank 0": 0.10, "ref of rank 1": 0.05}
    clock = 0.0

    def wait(refs, *, num_returns, timeout):
        nonlocal clock
        due = sorted(ends[ref] for ref in refs)
        clock = max(clock, min(due[num_returns - 1], clock + timeout))
        ready = [ref for ref in refs if ends[ref] <= clock][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def get(ref):
        raise RuntimeError(f"from the {ref}")

    monkeypatch.setattr(launch.ray, "wait", wait)
    monkeypatch.setattr(launch.ray, "get", get)
    plans = [SimpleNamespace(place=SimpleNamespace(rank=rank), facts=None) for rank in range(2)]
    monkeypatch.setattr(
        launch, "_start_error", lambda error, plan, started, waiting: WorkerStartError(f"{plan.place.rank}: {error}")
    )
    with pytest.raises(WorkerStartError, match="1: from the ref of rank 1"):
        wait_started(list(ends), plans, name="a group", timeout_s=10)


def test_an_interrupt_while_a_registration_is_withdrawn(monkeypatch):
    """The workers end before anything that may be slow, so an interrupt there leaves no worker behind."""
    ended = []
    monkeypatch.setattr(resources, "kill_and_wait", lambda workers: ended.extend(workers) or [])

    def withdraw():
        raise KeyboardInterrupt

    held = Resources(SimpleNamespace(connected=True), registration=SimpleNamespace(withdraw=withdraw))
    held.add({0: "worker of rank 0"})
    with pytest.raises(KeyboardInterrupt):
        held.give_back()
    assert ended == [0]


def test_a_repetition_ends_in_the_log(monkeypatch):
    """A call that is repeated on some of its workers is a second entry, which ends when the call ends."""
    monkeypatch.setattr(requests, "task_of_future", lambda future: future.encode().ljust(24))
    log = requests.RequestLog("test")
    log.begin("train", 1.0, ["first of 0", "first of 1"])
    log.end(["first of 0", "first of 1"], failed=True)
    log.begin("train", 1.0, ["again of 1"])
    log.end(["first of 0", "again of 1"])
    assert not log._open
