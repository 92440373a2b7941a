# SPDX-License-Identifier: Apache-2.0
"""Links with a bound of memory between groups of real workers."""

import functools
import gc
import itertools
import threading

import numpy as np
import pytest

from fairlead_sharding import NamedSharding
from fairlead_transfer import Layout, LayoutMismatchError, Link, LocalTensor, StaleWeightsError, TransferError
from fairlead_transfer.testing import fail_at
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, current_worker
from fairlead_workergroup.testing import kill, resume

from ..faults import REPEATS, check_fault, send_and_time
from ..holders import AsyncHolder, Holder, two_groups

SLOTS = 9
BOUND = 1 << 16
MIB = 1 << 20
# Larger than the bound, in one dim and in several; smaller; and empty.
SHAPES = {"long": (100_003,), "wide": (7, 30_011), "deep": (5, 3, 4_099), "norm": (5,), "step": (), "none": (0, 3)}

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.nightly]


class Model:
    """Holds boxes of tensors, in numpy or torch; the rows of "deep" and "long" are uneven."""

    def __init__(self, library, dims, dtype="float32"):
        me = current_worker()
        self.boxes, self.tensors, self.library = {}, {}, library
        for name, shape in SHAPES.items():
            layout = Layout.from_sharding(
                shape, me.sharding, {dim: axis for dim, axis in dims.items() if dim < len(shape)}
            )
            pairs = zip(layout.offsets[me.rank].tolist(), layout.sizes[me.rank].tolist(), strict=True)
            self.boxes[name] = tuple(slice(at, at + size) for at, size in pairs)[: len(shape)]
            value = np.zeros(shape, dtype)[self.boxes[name]]
            self.tensors[name] = np.array(value, dtype)
        # A target that is not in one piece.
        self.tensors["wide"] = np.asfortranarray(self.tensors["wide"])
        if library == "torch":
            import torch

            self.tensors = {name: torch.from_numpy(value) for name, value in self.tensors.items()}

    def values(self, seed):
        rng = np.random.default_rng(seed)
        whole = {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}
        return {name: value[self.boxes[name]] for name, value in whole.items()}

    def fill(self, seed):
        for name, value in self.values(seed).items():
            np.asarray(self.tensors[name])[...] = value

    def weights(self):
        return {
            name: LocalTensor(tensor, SHAPES[name], [part.start for part in self.boxes[name]])
            for name, tensor in self.tensors.items()
        }

    def load(self, tensors):
        for name, value in tensors.items():
            np.asarray(self.tensors[name])[...] = np.asarray(value)[self.boxes[name]]

    def differing(self, seed):
        """Return the names of tensors that are not bit by bit what a send of this state has to bring."""
        return [
            name
            for name, value in self.values(seed).items()
            if not np.array_equal(np.asarray(self.tensors[name]), value.astype("float32"))
        ]


@pytest.mark.parametrize(
    ("library", "ranks", "cases"),
    [
        ("numpy", (2, 3), [("in_place", "shared_memory"), ("staged", "shared_memory"), ("apply", "object_store")]),
        ("torch", (1, 1), [("in_place", "object_store")]),
    ],
)
def test_every_bit(slots, library, ranks, cases):
    """Each tensor arrives bit by bit, also one larger than the bound, strided, cast, or split unevenly."""
    pytest.importorskip(library)
    train, serve = (NamedSharding.from_shape(tp=count) for count in ranks)
    taken = slots[4 : 4 + ranks[0]], slots[6 : 6 + ranks[1]]
    with (
        RayWorkerGroup(
            taken[0], RayWorkerBuilder(Model, library, {0: "tp"}, "float64"), sharding_annotations=train
        ) as source,
        RayWorkerGroup(taken[1], RayWorkerBuilder(Model, library, {1: "tp"}), sharding_annotations=serve) as target,
    ):
        for version, (commit, transport) in enumerate(cases):
            options = {"apply": "load"} if commit == "apply" else {"target": "weights", "commit": commit}
            options |= {"transport": transport, "verify": "always", "max_bytes_in_flight": 8 * BOUND}
            with Link(source, target, source="weights", dtype="float32", **options) as link:
                for seed in (2 * version, 2 * version + 1)[version > 0 :]:
                    source.call("fill", seed).result()
                    report = link.send(seed, timeout=60)
                    assert target.call("differing", seed).result() == [[]] * ranks[1]
                    assert report.rounds <= 3
                    assert report.verified
                    assert report.bytes_moved == link.explain().plan.lower_bound
                    assert set(report.transports) == {transport}
                assert {*report.seconds} >= {"collect", "stage", "move", "commit", "verify"}


class Large(Holder):
    """Holds a tensor too that takes several buckets."""

    def __init__(self, dims, scale=0.0):
        self.large = np.zeros((8, 1 << 13), "float32")
        super().__init__(dims, scale)

    def fill(self, scale):
        super().fill(scale)
        self.large[...] = scale * np.arange(1 << 13)

    def weights(self):
        me = current_worker()
        half = 4 * me.rank if me.sharding.shape.get("tp", 1) > 1 else 0
        mine = self.large[half : half + 4] if me.sharding.shape.get("tp", 1) > 1 else self.large
        return {**super().weights(), "large": LocalTensor(mine, self.large.shape, (half, 0))}

    def scale(self):
        return float(self.step)

    def holds(self):
        held = super().holds()
        return held if held is not None and (self.large == held * np.arange(1 << 13)).all() else None


@pytest.fixture
def groups(slots):
    with two_groups(slots, Large) as made:
        yield made


CASES = {
    "staged": [("source", "stage"), ("source", "feed"), ("target", "move"), ("target", "committing")],
    "in_place": [("source", "stage"), ("target", "move"), ("target", "commit"), ("target", "committing")],
}


def test_faults(groups):
    """Before the decision all targets stay as they were; after it a rank that was lost is brought forward."""
    for commit, cases in CASES.items():
        version = itertools.count(1)
        options = {"verify": "always", "commit": commit, "max_bytes_in_flight": BOUND}
        with Link(*groups, source="weights", target="weights", **options) as link:
            for side, phase in cases * REPEATS:
                check_fault(*groups, link, side, phase, "kill", version)


def test_torn_ranks(groups, call_in_time):
    """A source that is lost between two buckets leaves torn ranks, which refuse calls until the next send."""
    source, target = groups
    with Link(source, target, source="weights", target="weights", commit="in_place", max_bytes_in_flight=BOUND) as link:
        source.call("fill", 1.0).result()
        stopped_s = send_and_time(link, 1)
        link.guard("holds")
        for version, how, timeout_s in ((2, "stop", stopped_s), (4, "kill", 60)):
            fail_at(source, 1, "source", "feed", how)
            source.call("fill", float(version)).result()
            send = functools.partial(link.send, version, timeout=timeout_s)
            with pytest.raises(TransferError, match="source rank 1") as caught:
                raise call_in_time({"send": send}, timeout_s)["send"]
            assert caught.value.phase == "commit"
            assert link.versions() == {0: "torn", 1: "torn"}
            with pytest.raises(StaleWeightsError):
                target.call("holds")
            if how == "stop":
                resume(source, 1)
            else:
                assert source.restart_failed_workers() == [1]
            source.call("fill", version + 1.0).result()
            link.send(version + 1, timeout=60)
            assert target.call("holds").result() == [version + 1.0] * 2
        # A restarted rank gets the version from a target that holds it; without one, the error says what to do.
        kill(target, 1)
        assert target.restart_failed_workers() == [1]
        assert link.versions() == {0: 5, 1: None}
        source.call("fill", 6.0).result()
        link.sync(timeout=60)
        assert target.call("holds").result() == [5.0, 5.0]
        assert link.versions() == {0: 5, 1: 5}
        for rank in (0, 1):
            kill(target, rank)
        assert target.restart_failed_workers() == [0, 1]
        with pytest.raises(TransferError, match="No rank holds version 5 any more"):
            link.sync(timeout=60)
        link.send(6, timeout=60)
        assert target.call("holds").result() == [6.0, 6.0]


def test_what_is_refused(groups):
    """Replicas that differ, before the first byte is written; bad bounds; and what a bound excludes."""
    source, target = groups
    for bound in (0, -1, BOUND - 1, True, "64 MiB", 1e9):
        with pytest.raises(
            ValueError, match="max_bytes_in_flight must be a whole number of at least 65,536 bytes, got"
        ):
            Link(source, target, source="weights", target="weights", max_bytes_in_flight=bound)
    with pytest.raises(ValueError, match="needs two groups"):
        Link(source, source, source="weights", target="weights", max_bytes_in_flight=BOUND)
    with (
        Link(source, target, source="weights", target="weights", max_bytes_in_flight=BOUND) as link,
        pytest.raises(ValueError, match="max_bytes_in_flight=65,536: send without delta="),
    ):
        link.send(1, delta=True)
    with Link(target, source, source="weights", target="weights", commit="in_place", max_bytes_in_flight=BOUND) as link:
        source.call("fill", 2.0).result()
        target.call("fill", 3.0).result()
        target.at(replica=1).call("fill", 1.0).result()
        with pytest.raises(LayoutMismatchError, match="different bytes"):
            link.send(1, timeout=60)
        assert source.call("holds").result() == [2.0, 2.0]
        target.call("fill", 3.0).result()
        link.send(1, timeout=60)
        assert source.call("scale").result() == [3.0, 3.0]


class Copy:
    """Holds all of two tensors, the second of which other ranks read first."""

    def __init__(self):
        self.tensors = {name: np.zeros(2 * BOUND, "uint8") for name in ("first", "second")}

    def fill(self, value):
        for tensor in self.tensors.values():
            tensor[...] = value

    def weights(self):
        return self.tensors

    def holds(self):
        return [sorted({*tensor.tolist()}) for tensor in self.tensors.values()]


def test_copies(slots):
    """Each rank reads from all copies at the source, also if others read the first bucket of one of them."""
    with (
        RayWorkerGroup(slots[4:6], RayWorkerBuilder(Copy)) as source,
        RayWorkerGroup(slots[6:8], RayWorkerBuilder(Copy)) as target,
    ):
        for commit in ("in_place", "staged"):
            options = {"commit": commit, "max_bytes_in_flight": BOUND, "transport": "shared_memory"}
            with Link(source, target, source="weights", target="weights", **options) as link:
                for value in (1, 2):
                    source.call("fill", value).result()
                    link.send(value, timeout=60)
                    assert target.call("holds").result() == [[[value], [value]]] * 2


class Overlapping(AsyncHolder, Large):
    """The same, with methods that overlap."""


def test_methods_that_overlap(slots):
    """No method runs on a mixture of two versions."""
    groups = [
        RayWorkerGroup(
            slots[4 + at : 6 + at],
            RayWorkerBuilder(Overlapping, dims),
            sharding_annotations=sharding,
            async_communication=True,
        )
        for at, dims, sharding in (
            (0, {0: "tp"}, NamedSharding.from_shape(tp=2)),
            (2, {}, NamedSharding.from_shape(replica=2)),
        )
    ]
    with (
        groups[0] as source,
        groups[1] as target,
        Link(source, target, source="weights", target="weights", commit="in_place", max_bytes_in_flight=BOUND) as link,
    ):
        stopping, seen = threading.Event(), []

        def look():
            while not stopping.is_set():
                seen.extend(target.call("generate", 0.001).result())

        thread = threading.Thread(target=look)
        thread.start()
        try:
            for version in range(6):
                source.call("fill", float(version)).result()
                link.send(version, timeout=60)
        finally:
            stopping.set()
            thread.join()
        assert len(seen) > 4
        assert all(before is not None and before == after for before, after in seen), seen


class Weights:
    """Holds so many MiB of one tensor, and measures the peak of its own memory."""

    def __init__(self, mib, value):
        self.w = np.full((mib, MIB // 4), value, "float32")

    def weights(self):
        return {"w": self.w}

    def is_all(self, value):
        return bool((self.w == value).all())

    def reset_peak(self):
        gc.collect()
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        return self.read("VmHWM:")

    def read(self, key="VmHWM:"):
        """Return a figure of the kernel's in MiB."""
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) / 1024 for line in file if line.startswith(key))


def measure_peaks(slots, mib, bound):
    """Return how many MiB source and target take above their weights, at most over two sends."""
    with (
        RayWorkerGroup(slots[4:5], RayWorkerBuilder(Weights, mib, 1.0)) as source,
        RayWorkerGroup(slots[5:6], RayWorkerBuilder(Weights, mib, 0.0)) as target,
        Link(
            source, target, source="weights", target="weights", commit="in_place", max_bytes_in_flight=bound * MIB
        ) as link,
    ):
        before = [group.call("reset_peak").result()[0] for group in (source, target)]
        for version in range(2):
            link.send(version, timeout=120)
        after = [group.call("read").result()[0] for group in (source, target)]
        assert target.call("is_all", 1.0).result() == [True]
    return [peak - base for peak, base in zip(after, before, strict=True)]


def test_peak(slots):
    """The weights go through a bound that is a sixteenth of them; each process takes at most half more than that."""
    peaks = measure_peaks(slots, 512, 32)
    assert max(peaks) <= 48, peaks
    assert max(peaks) >= 16, f"the peak was not measured: {peaks}"


def test_peak_of_much(slots):
    """The same of 2 GiB through 128 MiB."""
    peaks = measure_peaks(slots, 2048, 128)
    assert max(peaks) <= 192, peaks
