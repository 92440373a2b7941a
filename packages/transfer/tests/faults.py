# SPDX-License-Identifier: Apache-2.0
"""Faults in the middle of a transfer, and what has to hold then, on one host and across hosts."""

import os
import time

import pytest
import ray

from fairlead_transfer import TransferError
from fairlead_transfer._remote.entry import find_shared
from fairlead_workergroup.extension import Site
from fairlead_workergroup.testing import resume

# `nox -s nightly` repeats each case 20 times.
REPEATS = int(os.environ.get("FAIRLEAD_FAULTS", "1"))
CASES = [("source", "collect"), ("source", "stage")]
CASES += [("target", phase) for phase in ("collect", "move", "commit", "committing")]


def fail_at(group, rank, side, phase, how):
    """Have a worker be killed or stopped when its next transfer reaches a phase.

    Args:
        group: the worker's.
        rank: its number in the group.
        side: whether it counts as a source or a target: it may be both.
        phase: one of those in `CASES`; "committing" is after the first tensor has been overwritten.
        how: "kill" (SIGKILL) or "stop" (SIGSTOP). `resume(group, rank)` continues a stopped worker.
    """

    def plan_fault(worker):
        find_shared("faults", {})[side, phase] = how

    site = Site(group)
    requests = site.send("plan_fault", ray.cloudpickle.dumps(plan_fault), {site.state().members[rank]: ()})
    reply = site.collect(requests, 30.0)[rank]
    assert reply.error is None, reply


def send_and_time(link, version, least_s=3.0):
    """Send a version, and return the timeout of a send in which a worker is stopped, at least so many seconds.

    By then the other ranks have to have answered, so on a busy machine it is ten times what this send has taken.
    """
    began = time.monotonic()
    link.send(version, timeout=60)
    return max(least_s, 10 * (time.monotonic() - began))


def check_fault(source, target, link, side, phase, how, version, timeout_s=3.0):
    """Check that rank 1 of a side is named, that targets stay old or go forward, and that the next send works.

    Args:
        source: a group of two ranks that hold different parts.
        target: a group of two replicas.
        link: from the one to the other.
        side, phase, how: as of `fail_at`.
        version: an iterator of versions.
        timeout_s: of a send in which the worker is stopped, so that only the deadline ends it; see `send_and_time`.

    Returns:
        The seconds after which it failed.
    """
    group = source if side == "source" else target
    source.call("fill", 1.0).result()
    old = next(version)
    timeout_s = send_and_time(link, old, timeout_s)
    new = next(version)
    source.call("fill", 2.0).result()
    fail_at(group, 1, side, phase, how)
    began = time.monotonic()
    with pytest.raises(TransferError) as caught:
        link.send(new, timeout=timeout_s if how == "stop" else 600)
    took = time.monotonic() - began
    error = caught.value
    assert [(failure.side, failure.rank) for failure in error.failures] == [(side, 1)]
    assert error.version == new
    assert all(failure.node_id for failure in error.failures)
    decided = phase in ("commit", "committing")
    assert (error.phase == "commit") == decided
    if how == "stop":
        resume(group, 1)
    else:
        assert group.restart_failed_workers() == [1]
    if decided:
        assert target.call("holds", collect=()).result() == 2.0  # rank 0 has committed
        assert link.versions()[0] == new
        source.call("fill", 3.0).result()  # what `sync` brings is what was sent
        link.sync(timeout=60)
        assert target.call("holds").result() == [2.0, 2.0]
        assert link.versions() == {0: new, 1: new}
    else:
        assert target.call("holds").result() == [1.0, 1.0 if side == "source" or how == "stop" else 0.0]
        assert link.version == old
    source.call("fill", 3.0).result()
    link.send(next(version), timeout=60)
    assert target.call("holds").result() == [3.0, 3.0]
    return took
