# SPDX-License-Identifier: Apache-2.0
"""A worker is killed or stopped in each phase of a transfer."""

import itertools

import pytest

from fairlead_sharding import NamedSharding
from fairlead_transfer import Link, TransferError
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup
from fairlead_workergroup.testing import kill, resume

from ..faults import CASES, REPEATS, check_fault, fail_at, send_and_time
from ..holders import Holder, two_groups

SLOTS = 6

pytestmark = [pytest.mark.usefixtures("local_ray"), *([pytest.mark.nightly] if REPEATS > 1 else [])]


@pytest.fixture
def groups(slots):
    with two_groups(slots, Holder) as made:
        yield made


@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.nightly)])
def test_faults(groups, how):
    """The error names rank, phase and version in time; before the decision all targets stay as they were."""
    version = itertools.count(1)
    with Link(*groups, source="weights", target="weights") as link:
        took = [check_fault(*groups, link, side, phase, how, version) for side, phase in CASES * REPEATS]
    print(f"\n{len(took)} faults on one host; reported after {min(took):.2f} to {max(took):.2f} s")  # noqa: T201


def test_dead_source_with_a_replica(groups, slots):
    """If another source rank holds what a dead one held, it sends it."""
    _, target = groups
    with (
        RayWorkerGroup(
            slots[4:6],
            RayWorkerBuilder(Holder, {}, 5.0),
            sharding_annotations=NamedSharding.from_shape(dp=2),
        ) as replicas,
        Link(replicas, target, source="weights", target="weights") as link,
    ):
        fail_at(replicas, 0, "source", "stage", "kill")
        link.send(0, timeout=60)
        assert target.call("holds").result() == [5.0, 5.0]
        link.send(1, timeout=60)
        replicas.restart_failed_workers()
        assert link.send(2, timeout=60).replicas_compared


def test_sync_from_a_replica(groups):
    """If the source does not have a version any more, other target ranks send it; without them the error says so."""
    source, target = groups
    source.call("fill", 2.0).result()
    with Link(source, target, source="weights", target="weights") as link:
        link.send(0, timeout=60)
        for rank in range(2):
            kill(source, rank)
        source.restart_failed_workers()
        kill(target, 1)
        target.restart_failed_workers()
        assert link.versions() == {0: 0, 1: None}
        report = link.sync(timeout=60)
        assert report.bytes_moved == 4 * (12 * 8 + 5 + 1)
        assert target.call("holds").result() == [2.0, 2.0]
        assert link.versions() == {0: 0, 1: 0}
        for rank in range(2):
            kill(target, rank)
        target.restart_failed_workers()
        with pytest.raises(TransferError, match="No rank holds version 0 any more"):
            link.sync(timeout=60)
        link.send(0, timeout=60, again=True)
        assert link.versions() == {0: 0, 1: 0}


@pytest.mark.parametrize("transport", ["auto", pytest.param("object_store", marks=pytest.mark.nightly)])
def test_sync_after_a_send_that_failed(groups, transport):
    """A failed send may have overwritten what the sources kept of the last version: other target ranks have it."""
    source, target = groups
    source.call("fill", 1.0).result()
    with Link(source, target, source="weights", target="weights", transport=transport) as link:
        link.send(0, timeout=60)
        source.call("fill", 2.0).result()
        fail_at(target, 1, "target", "move", "kill")
        with pytest.raises(TransferError):
            link.send(1, timeout=60)
        assert target.restart_failed_workers() == [1]
        assert link.versions() == {0: 0, 1: None}
        link.sync(timeout=60)
        assert link.versions() == {0: 0, 1: 0}
        assert target.call("holds").result() == [1.0, 1.0]


def test_stopped_worker_that_continues_late_changes_nothing(groups):
    """A target that was stopped in a move, and continues after a later send, does not commit the old version."""
    source, target = groups
    source.call("fill", 1.0).result()
    with Link(source, target, source="weights", target="weights") as link:
        timeout_s = send_and_time(link, 0)
        source.call("fill", 2.0).result()
        fail_at(target, 1, "target", "move", "stop")
        with pytest.raises(TransferError) as caught:
            link.send(1, timeout=timeout_s)
        assert caught.value.phase == "move"
        resume(target, 1)
        assert target.call("holds").result() == [1.0, 1.0]
        assert link.versions() == {0: 0, 1: 0}
