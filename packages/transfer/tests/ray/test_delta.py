# SPDX-License-Identifier: Apache-2.0
"""Links that move only what has changed, between groups of real workers."""

import numpy as np
import pytest

from fairlead_sharding import NamedSharding
from fairlead_transfer import Layout, LayoutMismatchError, Link, LocalTensor, TransferError
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, Restart, current_worker
from fairlead_workergroup.testing import kill

SLOTS = 12
SHAPE = 256, 512
pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.nightly]


class Model:
    """Holds the box of "w" that its rank has, and the whole of "norm"."""

    def __init__(self, dims, dtype="float32"):
        me = current_worker()
        layout = Layout.from_sharding(SHAPE, me.sharding, dims)
        self.offsets, sizes = layout.offsets[me.rank].tolist(), layout.sizes[me.rank].tolist()
        self.box = tuple(slice(at, at + size) for at, size in zip(self.offsets, sizes, strict=True))
        self.w, self.norm = np.zeros(sizes, dtype), np.zeros(5, dtype)

    def change(self, seed, density):
        """Change some elements of the global tensor, the same ones on all ranks."""
        rng = np.random.default_rng(seed)
        where = rng.random(SHAPE) < density
        self.w[...] = np.where(where, rng.random(SHAPE), self.whole())[self.box]

    def whole(self):
        """Return a global tensor with the own part in its place."""
        whole = np.zeros(SHAPE, self.w.dtype)
        whole[self.box] = self.w
        return whole

    def spoil(self, column=0):
        self.w[:, column] += 1

    def weights(self):
        return {"w": LocalTensor(self.w, SHAPE, self.offsets), "norm": self.norm}

    def tied(self):
        """Return one tensor by two names."""
        return {"first": self.norm, "second": self.norm}

    def untied(self):
        """Return two tensors, whose first two elements are those of "norm"."""
        return {"first": self.norm, "second": np.append(self.norm[:2], np.zeros(3, self.norm.dtype))}

    def wake(self):
        """Return from a sleep that has lost the weights."""
        self.w[...] = 7

    def wake_norm(self):
        self.norm[...] = 7

    def set_norm(self, values):
        self.norm[...] = values

    def get_norm(self):
        return self.norm

    def nothing(self):
        """Do nothing."""

    def load(self, tensors):
        """Take whole tensors."""


def make_pair(slots, sources, targets):
    """Start a source that splits "w" over (dp, tp), and a target that splits its columns, with 2 replicas."""
    return [
        RayWorkerGroup(
            part, RayWorkerBuilder(Model, dims), sharding_annotations=sharding, restart=Restart(max_restarts=10)
        )
        for part, dims, sharding in (
            (slots[: sources.size], {0: ("tp", "dp")}, sources),
            (slots[sources.size :], {1: "tp"}, targets),
        )
    ]


@pytest.fixture(scope="module")
def pair(slots):
    """Return two groups of four ranks that the tests keep."""
    sources, targets = NamedSharding.from_shape(dp=2, tp=2), NamedSharding.from_shape(replica=2, tp=2)
    source, target = make_pair(slots[:8], sources, targets)
    with source, target:
        yield source, target


def check(pair):
    """Compare the whole tensor of the target with that of the source."""
    sent, got = (group.call("whole").result() for group in pair)
    for replica in (got[: len(got) // 2], got[len(got) // 2 :]):
        assert np.array_equal(sum(replica), sum(sent))


@pytest.mark.parametrize("delta", [True, "blocks"])
@pytest.mark.parametrize("transport", ["shared_memory", "object_store"])
def test_only_changes_move(pair, transport, delta):
    """The first send is whole and says why; later ones move what has changed, and nothing if nothing has."""
    trainer, server = pair
    trainer.call("change", 100, 1.0).result()
    with Link(trainer, server, source="weights", target="weights", transport=transport) as link:
        first = link.send(0, timeout=60, delta=delta)
        check(pair)
        assert first.delta.bytes_saved == first.delta.elements == 0
        reason = "it keeps no copy of the version that the targets hold"
        assert first.delta.whole == tuple(f"source rank {rank}: {reason}" for rank in range(4))
        assert f"whole tensors, because source rank 0: {reason}" in str(first)
        for step, density in enumerate((0.0005, 0.0, 0.03 if delta is True else 0.001), 1):
            trainer.call("change", step, density).result()
            report = link.send(step, timeout=60, delta=delta)
            check(pair)
            assert report.delta.whole == ()
            assert report.rounds == 3
            assert report.bytes_moved + report.delta.bytes_saved == first.bytes_moved
            if delta is True:
                assert report.delta.density == pytest.approx(density, rel=0.2)
                assert report.bytes_moved <= {0.03: 0.08, 0.0005: 0.003, 0.0: 0.0}[density] * first.bytes_moved
            else:
                assert report.bytes_moved < first.bytes_moved
        assert link.versions() == dict.fromkeys(range(4), 3)
        whole = link.send(4, timeout=60)
        assert (whole.delta, whole.bytes_moved) == (None, first.bytes_moved)
        assert link.send(5, timeout=60, delta=delta).delta.whole == first.delta.whole


def test_a_target_that_has_changed_its_tensors(pair):
    """Whole tensors travel in the same send, and the report says which rank was the reason."""
    trainer, server = pair
    with Link(trainer, server, source="weights", target="weights") as link:
        link.send(0, timeout=60, delta=True)
        server.at(tp=1, replica=0).call("spoil").result()
        trainer.call("change", 7, 0.01).result()
        report = link.send(1, timeout=60, delta=True)
        assert report.delta.whole[0] == "target rank 1: it has changed 'w' since the last version"
        check(pair)
        trainer.call("change", 8, 0.01).result()
        assert not link.send(2, timeout=60, delta=True).delta.whole
        check(pair)


@pytest.mark.parametrize("delta", [False, True])
def test_tied_targets(pair, delta):
    """Two names of one memory get the same values; if these differ, the send is refused and changes nothing."""
    trainer, server = pair
    with Link(trainer, server, source="untied", target="tied") as link:
        for step in (0, 1):
            trainer.call("set_norm", [step, 2, 0, 0, 0]).result()
            assert link.send(step, timeout=60, delta=delta).version == step
        trainer.call("set_norm", [1, 2, 3, 0, 0]).result()
        with pytest.raises(LayoutMismatchError, match="in the memory of 'first', and they differ in the source"):
            link.send(2, timeout=60, delta=delta)
        assert link.versions() == dict.fromkeys(range(4), 1)
        assert [norm.tolist() for norm in server.call("get_norm").result()] == [[1, 2, 0, 0, 0]] * 4


def test_restarted_ranks(slots):
    """A rank without the last version gets whole tensors; after `sync`, patches are enough again."""
    sources, targets = NamedSharding.from_shape(dp=1, tp=2), NamedSharding.from_shape(replica=2, tp=1)
    trainer, server = pair = make_pair(slots[8:], sources, targets)
    with trainer, server, Link(trainer, server, source="weights", target="weights") as link:
        link.send(0, timeout=60, delta=True)
        trainer.call("change", 1, 0.01).result()
        assert not link.send(1, timeout=60, delta=True).delta.whole
        kill(server, 1)
        server.restart_failed_workers()
        assert link.sync(timeout=60).bytes_moved > 0  # from the other replica, since sources have kept patches only
        check(pair)
        trainer.call("change", 2, 0.01).result()
        assert not link.send(2, timeout=60, delta=True).delta.whole
        check(pair)
        kill(server, 0)
        server.restart_failed_workers()
        trainer.call("change", 3, 0.01).result()
        assert link.send(3, timeout=60, delta=True).delta.whole == ("target rank 0: it holds nothing",)
        check(pair)
        kill(trainer, 1)
        trainer.restart_failed_workers()
        trainer.call("change", 4, 1.0).result()
        report = link.send(4, timeout=60, delta=True)
        assert report.delta.whole == ("source rank 1: it keeps no copy of the version that the targets hold",)
        check(pair)


def test_two_links_into_the_same_tensors(pair):
    """What another link has put into place is no version to patch."""
    trainer, server = pair
    with (
        Link(trainer, server, source="weights", target="weights") as first,
        Link(trainer, server, source="weights", target="weights") as second,
    ):
        first.send(0, timeout=60, delta=True)
        trainer.call("change", 1, 0.5).result()
        second.send(0, timeout=60)
        trainer.call("change", 2, 0.01).result()
        assert first.send(1, timeout=60, delta=True).delta.whole
        check(pair)


def test_before_commit_that_loses_the_tensors(pair):
    """A patch is not applied to tensors that `before_commit` has replaced; the next send, which is whole, is."""
    trainer, server = pair
    with Link(trainer, server, source="weights", target="weights", before_commit="nothing") as link:
        link.send(0, timeout=60, delta=True)
        trainer.call("change", 1, 0.01).result()
        assert not link.send(1, timeout=60, delta=True).delta.whole
        check(pair)
    # "norm" has not changed in the source, so nothing of it travels.
    for before, name in (("wake", "w"), ("wake_norm", "norm")):
        with Link(trainer, server, source="weights", target="weights", before_commit=before) as link:
            link.send(0, timeout=60, delta=True)
            trainer.call("change", 5, 0.01).result()
            with pytest.raises(TransferError, match=f"before_commit has changed '{name}'"):
                link.send(1, timeout=60, delta=True)
            assert link.send(2, timeout=60, delta=True).delta.whole
            check(pair)


def test_bad_input(pair):
    """What has no tensors in place, or commits in place, cannot be patched; nothing has been sent."""
    trainer, server = pair
    with Link(trainer, server, source="weights", target="weights") as link:
        with pytest.raises(ValueError, match="delta must be True, False or 'blocks', got 'rows'"):
            link.send(0, delta="rows")
        assert link.version is None
    with (
        Link(trainer, server, source="weights", apply="load") as link,
        pytest.raises(ValueError, match="it needs target= and commit='staged'"),
    ):
        link.send(0, delta=True)
