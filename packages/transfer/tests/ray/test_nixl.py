# SPDX-License-Identifier: Apache-2.0
"""Links by NIXL between workers of this node; skipped without the wheel."""

import itertools
import sys

import numpy as np
import pytest

from fairlead_transfer import LayoutMismatchError, Link, TransferError
from fairlead_transfer._remote.agent import explain_missing
from fairlead_transfer.testing import fail_at
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup
from fairlead_workergroup.testing import kill, resume

from ..faults import check_fault, send_and_time
from ..holders import Holder, two_groups

SLOTS = 5

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.nightly]
if explain_missing():
    pytest.skip(f"no NIXL: {explain_missing()}", allow_module_level=True)


class Large(Holder):
    """Holds a tensor too that is read from where it is."""

    def __init__(self, dims, scale=0.0):
        self.large = np.zeros((64, 16384), "float32")
        super().__init__(dims, scale)

    def fill(self, scale):
        super().fill(scale)
        self.large[...] = scale

    def weights(self):
        return {**super().weights(), "large": self.large}

    def both(self):
        """Return one tensor by two names."""
        return {"first": self.large, "second": self.large}

    def halves(self):
        """Return two tensors, the second of which repeats the last element of the first."""
        return {"first": self.large, "second": np.full_like(self.large, self.large[-1, -1])}

    def spoil(self):
        self.large[0] = 7

    def holds(self):
        held = super().holds()
        return held if (self.large == held).all() else None


class Moving(Large):
    """Holds a large tensor whose memory changes between two sends."""

    def move(self, how):
        if how == "shrink":  # the same array and address, with less memory behind it
            self.large.resize((32, 16384), refcheck=False)
        elif how == "grow":
            self.large.resize((128, 16384), refcheck=False)
        else:  # freed, and allocated again, perhaps at the same address
            self.large = None
            self.large = np.zeros((64, 16384), "float32") if how == "replace" else np.zeros((16, 16384), "float32")


class Stored:
    """Holds a torch tensor whose storage is freed and allocated again."""

    def __init__(self, dims, scale=0.0):
        import torch

        self.w = torch.full((1 << 20,), scale)

    def reallocate(self, scale):
        storage = self.w.untyped_storage()
        size = storage.size()
        storage.resize_(0)
        storage.resize_(size)
        self.w.fill_(scale)

    def weights(self):
        return {"w": self.w}

    def holds(self):
        """Return the scale that all elements have; None for a mixture."""
        return float(self.w[0]) if bool((self.w == self.w[0]).all()) else None


class Plain(Large):
    """A worker whose Python lacks NIXL."""

    def __init__(self, dims, scale=0.0):
        sys.modules.update(dict.fromkeys(("nixl_cu12", "nixl_cu13")))
        super().__init__(dims, scale)


@pytest.fixture
def groups(slots):
    with two_groups(slots, Large) as made:
        yield made


def count_sockets(group):
    """Return how many sockets listen in the workers of a group."""
    psutil = pytest.importorskip("psutil")
    return sum(
        connection.status == psutil.CONN_LISTEN
        for status in group.get_worker_status()
        for connection in psutil.Process(status.pid).net_connections()
    )


@pytest.mark.parametrize("commit", ["staged", "in_place"])
def test_send(groups, commit):
    """Each send reads the current tensors, in at most three rounds; nothing is left when the link is closed."""
    source, target = groups
    before = count_sockets(source), count_sockets(target)
    with Link(source, target, source="weights", target="weights", transport="nixl", commit=commit) as link:
        for step in range(4):
            source.call("fill", step + 2.0).result()
            report = link.send(step, timeout=60)
            assert target.call("holds").result() == [step + 2.0] * 2
            assert report.rounds <= 3
            assert report.verified == (step == 0)
            assert report.bytes_moved == link.explain().plan.lower_bound
            assert set(report.transports) == {"nixl"}
        assert set(report.seconds) >= {"collect", "stage", "move", "commit"}
        assert "transport='nixl'" in str(link.explain())
    source.call("note").result()
    target.call("note").result()
    assert (count_sockets(source), count_sockets(target)) == before


def test_delta(groups):
    """Whole tensors are read by NIXL, and what has changed since does not need it; a restarted rank reads again."""
    source, target = groups
    with Link(source, target, source="weights", target="weights", transport="nixl") as link:
        source.call("fill", 2.0).result()
        whole = link.send(0, timeout=60, delta=True).bytes_moved
        assert link.send(1, timeout=60, delta=True).bytes_moved == 0
        source.call("fill", 3.0).result()
        report = link.send(2, timeout=60, delta=True)
        assert (report.delta.whole, report.delta.density) == ((), pytest.approx(1, abs=0.001))  # but for zeros
        assert target.call("holds").result() == [3.0] * 2
        kill(target, 1)
        target.restart_failed_workers()
        source.call("fill", 4.0).result()
        report = link.send(3, timeout=60, delta=True)
        assert (report.delta.whole, report.bytes_moved) == (("target rank 1: it holds nothing",), whole)
        assert target.call("holds").result() == [4.0] * 2


@pytest.mark.parametrize("commit", ["staged", "in_place"])
def test_memory_that_moves(slots, commit):
    """A tensor that was resized in place, or freed and allocated again, is registered again where that is needed."""
    with (
        two_groups(slots, Moving) as (source, target),
        Link(source, target, source="weights", target="weights", transport="nixl", commit=commit) as link,
    ):
        for version, how in enumerate(["replace", "shrink", "replace", "grow", "tiny", "grow", "shrink"]):
            source.call("fill", version + 2.0).result()
            link.send(2 * version, timeout=60)
            for group in (source, target):
                group.call("move", how).result()
            source.call("fill", version + 3.0).result()
            target.call("fill", 0.0).result()
            link.send(2 * version + 1, timeout=60)
            assert target.call("holds").result() == [version + 3.0] * 2


def test_storage_that_is_resized(slots):
    """A torch tensor whose storage was freed and allocated again, as FSDP2 does, is read from its new memory."""
    pytest.importorskip("torch")
    with (
        two_groups(slots, Stored) as (source, target),
        Link(source, target, source="weights", target="weights", transport="nixl") as link,
    ):
        for version in range(4):
            source.call("reallocate", version + 1.0).result()
            link.send(version, timeout=60)
            assert target.call("holds").result() == [version + 1.0] * 2


def test_sync(groups):
    """What NIXL reads is not kept: `sync` reads from target ranks that hold the version."""
    source, target = groups
    source.call("fill", 2.0).result()
    for commit in ("staged", "in_place"):
        with Link(source, target, source="weights", target="weights", transport="nixl", commit=commit) as link:
            link.send(0, timeout=60)
            source.call("fill", 9.0).result()
            kill(target, 1)
            target.restart_failed_workers()
            link.sync(timeout=60)
            assert target.call("holds").result() == [2.0, 2.0]
            source.call("fill", 2.0).result()


@pytest.mark.parametrize(
    ("side", "phase", "how"),
    [
        ("source", "stage", "kill"),
        ("source", "stage", "stop"),
        ("target", "move", "kill"),
        ("target", "commit", "stop"),
    ],
)
def test_faults(groups, side, phase, how):
    """The error names rank, phase and version in time; before the decision all targets stay as they were."""
    with Link(*groups, source="weights", target="weights", transport="nixl", verify="always") as link:
        check_fault(*groups, link, side, phase, how, itertools.count(1))


def test_torn(groups):
    """If a target dies while it is overwritten, the other ranks hold the new version, and it is synced from them."""
    source, target = groups
    with Link(source, target, source="weights", target="weights", commit="in_place", verify="always") as link:
        source.call("fill", 1.0).result()
        timeout_s = send_and_time(link, 1)
        source.call("fill", 2.0).result()
        fail_at(target, 1, "target", "committing", "stop")
        with pytest.raises(TransferError) as caught:
            link.send(2, timeout=timeout_s)
        assert caught.value.phase == "commit"
        assert {failure.rank for failure in caught.value.failures} == {1}
        resume(target, 1)
        target.call("note").result()
        link.sync(timeout=60)
        assert link.versions() == {0: 2, 1: 2}
        assert target.call("holds").result() == [2.0, 2.0]


@pytest.mark.parametrize("bounded", [False, True])
def test_tied_targets(groups, bounded):
    """Two names of one memory that get different values are an error, also if NIXL reads into that memory."""
    source, target = groups
    options = {"commit": "in_place", "max_bytes_in_flight": (1 << 20) if bounded else None}
    with Link(source, target, source="halves", target="both", **options) as link:
        source.call("fill", 1.0).result()
        link.send(1, timeout=60)
        source.call("spoil").result()
        with pytest.raises(TransferError, match="in the memory of 'first', and they differ in the source"):
            link.send(2, timeout=60)
        assert link.versions() == {0: "torn", 1: "torn"}
        source.call("fill", 2.0).result()
        assert link.send(3, timeout=60).version == 3


def test_dtypes_that_differ_are_refused(groups):
    """In place, the dtype that travels is that of the target; with a second copy it may differ."""
    with (
        Link(*groups, source="weights", target="weights", dtype="float16", commit="in_place") as link,
        pytest.raises(LayoutMismatchError, match="give their dtype with dtype="),
    ):
        link.send(0, timeout=60)
    source, target = groups
    source.call("fill", 2.0).result()
    with Link(source, target, source="weights", target="weights", dtype="float16", transport="nixl") as link:
        link.send(0, timeout=60)
        assert target.call("holds").result() == [2.0, 2.0]


def test_worker_without_nixl(groups, slots):
    """A link by NIXL alone names the ranks that lack it, before anything moves."""
    source, _ = groups
    with RayWorkerGroup(slots[4:], RayWorkerBuilder(Plain, {})) as plain:
        for link in (
            Link(source, plain, source="weights", target="weights", transport="nixl"),
            Link(source, plain, source="weights", target="weights", commit="in_place"),
        ):
            with link, pytest.raises(TransferError, match=r"target rank 0 .*fairlead-transfer\[nixl\]") as caught:
                link.send(0, timeout=60)
            assert caught.value.phase == "collect"
        with Link(source, plain, source="weights", target="weights") as link:
            link.send(0, timeout=60)
