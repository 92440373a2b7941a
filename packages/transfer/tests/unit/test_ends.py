# SPDX-License-Identifier: Apache-2.0
"""What the ends of a link do in the workers, on numpy arrays and torch tensors."""

import asyncio
import concurrent.futures
import gc
import os
import random
import subprocess
import sys
import textwrap
import types
import zlib
from pathlib import Path

import numpy as np
import pytest
import ray

from fairlead_sharding import NamedSharding
from fairlead_transfer import Layout, LayoutMismatchError, LocalTensor
from fairlead_transfer._descriptions import Selection, check_dtypes, read_side
from fairlead_transfer._remote import segment
from fairlead_transfer._remote.entry import SHARED, note_weights
from fairlead_transfer._remote.replies import Described
from fairlead_transfer._remote.segment import NAME, Mapping, Segment
from fairlead_transfer._remote.tensors import digest, library
from fairlead_transfer._remote.transports import fetch_value
from fairlead_workergroup._remote.progress import NO_WEIGHTS, Record

from ..ends import Ends
from ..engines import leave_nothing, open_files

MODEL = {"embed": (12, 8), "norm": (5,), "step": (), "deep": (2, 3, 4, 5), "none": (0, 3)}


def model(dtype="float32"):
    rng = np.random.default_rng(0)
    return {name: (rng.random(shape) * 100).astype(dtype) for name, shape in MODEL.items()}


class Worker:
    """Holds tensors, and counts what is done with them."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.events = []

    def weights(self):
        return self.tensors

    def note(self):
        self.events.append("noted")

    def fail(self):
        raise ArithmeticError("broken")

    def load(self, tensors):
        self.events.append(list(tensors))
        for name, value in tensors.items():
            self.tensors[name] = np.array(value)

    def load_half(self, tensors):
        if self.events:
            raise ArithmeticError("broken")
        self.load(tensors)


def shard(values, mesh, dims):
    """Return a worker for each rank, with the boxes of each tensor along `dims` of its name."""
    layouts = {name: Layout.from_sharding(value.shape, mesh, dims.get(name, {})) for name, value in values.items()}
    workers = []
    for rank in range(mesh.size):
        tensors = {}
        for name, value in values.items():
            offset, size = layouts[name].offsets[rank], layouts[name].sizes[rank]
            box = tuple(slice(at, at + length) for at, length in zip(offset, size, strict=True))
            local = value[box if value.ndim else ()]
            tensors[name] = LocalTensor(np.array(local), value.shape, offset[: value.ndim].tolist())
        workers.append(Worker(tensors))
    return workers


def zeros(workers):
    """Return the same workers with all tensors zero."""
    return [
        Worker({n: LocalTensor(np.zeros_like(t.tensor), t.global_shape, t.offsets) for n, t in worker.tensors.items()})
        for worker in workers
    ]


def same(workers, expected):
    return all(
        np.array_equal(worker.tensors[name].tensor, other.tensors[name].tensor)
        for worker, other in zip(workers, expected, strict=True)
        for name in other.tensors
    )


def make_random_mesh(rng, sizes):
    """Return a mesh of three axes with random sizes, and which axes shard which dimensions of each tensor."""
    axes = {name: rng.choice(sizes) for name in "abc"}
    dims = {}
    for name, shape in MODEL.items():
        for axis in axes:
            if shape and rng.random() < 0.7:
                dims.setdefault(name, {}).setdefault(rng.randrange(len(shape)), []).append(axis)
    return NamedSharding.from_shape(**axes), dims


@pytest.mark.parametrize("seed", range(8))
def test_random_meshes(seed):
    """Every tensor arrives bit by bit, between any two meshes, and the bytes are the lower bound."""
    rng = random.Random(seed)

    values = model(rng.choice(["float32", "int8", "complex128", "bool"]))
    sources = shard(values, *make_random_mesh(rng, [1, 2, 3]))
    expected = shard(values, *make_random_mesh(rng, [1, 2, 3]))
    ends = Ends(sources, zeros(expected))
    moved = ends.send(1)
    assert same(ends.workers["target"], expected)
    assert moved == ends.plan().lower_bound
    for worker in sources:
        worker.tensors["norm"].tensor[...] = 7
    for worker in expected:
        worker.tensors["norm"].tensor[...] = 7
    ends.send(2)
    assert same(ends.workers["target"], expected)


def make_random_ends(rng):
    """Return ends with random layouts and nodes: uneven, replicated, strided and empty ones; and what is expected."""
    values = model(rng.choice(["float32", "int8", "float64"]))
    sources = shard(values, *make_random_mesh(rng, [1, 1, 2, 3]))
    expected = shard(values, *make_random_mesh(rng, [1, 1, 2, 3]))
    targets = zeros(expected)
    for worker in targets:
        for name, held in list(worker.tensors.items()):
            if held.tensor.ndim and rng.random() < 0.3:
                room = np.zeros([2 * size for size in held.tensor.shape], held.tensor.dtype)
                strided = room[tuple(slice(None, None, 2) for _ in held.tensor.shape)]
                worker.tensors[name] = LocalTensor(strided, held.global_shape, held.offsets)
    names = "abc"[: rng.choice([1, 2, 3])]
    nodes = [rng.choice(names) for _ in sources], [rng.choice(names) for _ in targets]
    return Ends(sources, targets, nodes=nodes, transport="tcp"), expected


def break_down(rng, ends):
    """Let version 1 fail in a random phase."""
    phase = rng.choice(["stage", "overwritten", "closed", "move", "superseded", "hook"])
    ends.plan()
    staged = ends.stage()
    if phase == "stage":
        return
    if phase == "overwritten":
        ends.stage()
    if phase == "closed":
        for rank in range(len(ends.workers["source"])):
            ends.restart("source", rank)
    replies = ends.fetch(staged, 1)
    if phase in ("overwritten", "closed"):
        needed = [bool(tasks["sources"]) for tasks in ends.tasks.target.values()]
        assert [reply.outcome != "done" for reply in replies] == needed
        committed = ends.commit(1)
        assert all(reply.outcome == "missing" for reply, needs in zip(committed, needed, strict=True) if needs)
    if phase == "superseded":
        late = ends.epoch
        ends.describe()
        ends.epoch = late
        assert all(reply.outcome == "superseded" for reply in ends.commit(1))
        ends.epoch = late + 1
    if phase == "hook":
        assert all(reply.error and not reply.inconsistent for reply in ends.commit(1, before="fail"))


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_layouts_and_faults(first):
    """After a fault in any phase all targets hold what they held, and the next transfer brings every byte."""
    with leave_nothing():
        for seed in range(first, first + 20):
            rng = random.Random(seed)
            ends, expected = make_random_ends(rng)
            break_down(rng, ends)
            held = [local.tensor for worker in ends.workers["target"] for local in worker.tensors.values()]
            assert not any(tensor.any() for tensor in held)
            ends.send(2)
            assert same(ends.workers["target"], expected)
            ends.close()
            del ends
            sys.modules.pop(SHARED)


def test_nothing_travels_within_a_process():
    """If the source and the target are one group, a rank copies what it holds from itself."""
    values, mesh = model(), NamedSharding.from_shape(dp=2, tp=2)
    expected = shard(values, mesh, {"embed": {0: "tp"}})
    ends = Ends(shard(values, mesh, {"embed": {0: ("tp", "dp")}}), zeros(expected), same=True)
    assert ends.send(1) == 4 * 12 * 8 * 4 // 4
    assert same(ends.workers["target"], expected)


def test_arrays_without_a_box_are_replicated():
    """A plain array is held as a whole by each rank; a rank need not hold every tensor."""
    sources = [Worker({"a": np.arange(6.0)}), Worker({"a": np.arange(6.0), "b": np.ones((2, 2), "int32")})]
    targets = [Worker({"a": np.zeros(6), "b": np.zeros((2, 2), "int32")}), Worker({"b": np.zeros((2, 2), "int32")})]
    Ends(sources, targets).send(1)
    assert targets[0].tensors["a"].tolist() == list(range(6))
    assert all(worker.tensors["b"].all() for worker in targets)


def test_strided_memory():
    """Transposed and sliced arrays are read and written in place."""
    values = np.arange(24.0).reshape(4, 6)
    room = np.zeros((8, 12))
    Ends([Worker({"a": values.T})], [Worker({"a": room[::2, ::2].T})]).send(1)
    assert np.array_equal(room[::2, ::2], values)
    assert not room[1::2].any()


def test_names_and_casts():
    """Names are mapped, patterns leave tensors out on both sides, and the cast happens at the source."""
    sources = [Worker({"model.a": np.array([1.1, 2.2]), "model.n": np.array([3]), "extra.x": np.ones(3)})]
    targets = [Worker({"a": np.zeros(2, "float32"), "n": np.array([0]), "cache": np.ones(1)})]
    ends = Ends(
        sources,
        targets,
        rename=lambda name: name.removeprefix("model."),
        exclude=("extra.*", "cache"),
        dtype="float16",
    )
    assert ends.send(1) == 2 * 2 + 8
    assert targets[0].tensors["a"].tolist() == np.array([1.1, 2.2], "float16").astype("float32").tolist()
    assert targets[0].tensors["n"].tolist() == [3]
    assert targets[0].tensors["cache"].tolist() == [1]


def test_descriptions_travel_once():
    """A description is sent again only if it has changed; another storage alone changes nothing."""
    worker = Worker({"a": np.zeros(4)})
    ends = Ends([worker], [Worker({"a": np.zeros(4)})])
    (first,), _ = ends.describe()
    assert first.number == 1
    worker.tensors = {"a": np.ones(4)}
    again = ends.ask("source", 0, "describe", 2, "weights", 1, None, 0, False, False)
    assert (again.number, again.tensors) == (1, None)
    worker.tensors = {"a": np.ones(5)}
    changed = ends.ask("source", 0, "describe", 3, "weights", 1, None, 0, False, False)
    assert changed.number == 2
    assert changed.tensors[0][4] == (5,)


def test_superseded_requests_are_refused():
    """A worker that continues late refuses requests of an attempt that a later one has superseded."""
    ends = Ends([Worker({"a": np.ones(4)})], [Worker({"a": np.zeros(4)})])
    ends.plan()
    fetched = ends.fetch(ends.stage(), 1)
    assert fetched[0].outcome == "done"
    late = ends.epoch
    ends.describe()
    assert ends.ask("target", 0, "commit", late, 1, None, None, None, 1).outcome == "superseded"
    assert ends.ask("source", 0, "describe", late, "weights", 0, None, 0, False, False).outcome == "superseded"
    assert not ends.workers["target"][0].tensors["a"].any()


def test_commit_without_staging():
    """A worker that has staged nothing of a version, as after a restart, says so."""
    ends = Ends([Worker({"a": np.ones(4)})], [Worker({"a": np.zeros(4)})])
    assert ends.commit(1)[0].outcome == "missing"


def test_commit_runs_the_hooks():
    """The methods around the commit run once; a commit that is repeated does nothing."""
    ends = Ends([Worker({"a": np.ones(4)})], [Worker({"a": np.zeros(4)})])
    ends.send(1, before="note", after="note")
    assert ends.workers["target"][0].events == ["noted"] * 2
    assert ends.commit(1, before="note")[0].version == 1
    assert ends.workers["target"][0].events == ["noted"] * 2


@pytest.mark.parametrize(("hook", "value"), [("before", 0), ("after", 1)])
def test_hooks_that_fail(hook, value):
    """A hook that fails is reported with its traceback, and whether the tensors are in place."""
    ends = Ends([Worker({"a": np.ones(4)})], [Worker({"a": np.zeros(4)})])
    ends.plan()
    ends.fetch(ends.stage(), 1)
    (reply,) = ends.commit(1, **{hook: "fail"})
    assert reply.error.startswith("ArithmeticError: broken\n")
    assert "in fail" in reply.error
    assert not reply.inconsistent
    assert ends.workers["target"][0].tensors["a"].tolist() == [value] * 4


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError])
def test_interrupted_commit_is_inconsistent(error):
    """An end whose commit was interrupted or cancelled midway says that it holds a mixture."""
    ends = Ends([Worker({"a": np.ones(4), "b": np.ones(4)})], [Worker({})], apply="load")
    ends.send(1, chunk_bytes=8)
    ends.plan()
    ends.fetch(ends.stage(), 2)

    def load(tensors):
        raise error

    ends.workers["target"][0].load = load
    with pytest.raises(error):
        ends.commit(2, chunk_bytes=8)
    assert ends.ends["target", 0].held == "inconsistent"


def test_apply_takes_chunks():
    """An engine that loads tensors itself gets whole tensors in chunks of bounded size."""
    values = {f"t{number}": np.full((4, 4), number, "float32") for number in range(5)} | {
        "big": np.ones((40, 4), "float32")
    }
    sources = shard(values, NamedSharding.from_shape(dp=2), {name: {0: "dp"} for name in values})
    ends = Ends(sources, [Worker({}), Worker({})], apply="load")
    ends.send(1, chunk_bytes=128)
    for worker in ends.workers["target"]:
        assert sorted(name for chunk in worker.events for name in chunk) == sorted(values)
        assert all(len(chunk) <= 2 for chunk in worker.events)
        assert ["big"] in worker.events
        assert all(np.array_equal(worker.tensors[name], value) for name, value in values.items())


def test_apply_that_fails_midway_is_inconsistent():
    """An engine that has loaded some chunks and failed holds a mixture."""
    ends = Ends([Worker({"a": np.ones(4), "b": np.ones(4)})], [Worker({})], apply="load_half")
    ends.plan()
    ends.fetch(ends.stage(), 1)
    (reply,) = ends.commit(1, chunk_bytes=1)
    assert reply.inconsistent
    ends.apply = "load"
    ends.send(2)
    assert ends.workers["target"][0].tensors["b"].tolist() == [1] * 4


def test_replicas_have_digests():
    """Each replica computes the digest of the boxes that others hold too."""
    ends = Ends([Worker({"a": np.ones(4)}), Worker({"a": np.zeros(4)})], [Worker({"a": np.zeros(4)})])
    ends.plan()
    first, second = (reply.digests for reply in ends.stage().values())
    assert first.keys() == second.keys() == {("a", (0,))}
    assert first != second


def test_segment_is_read_as_a_whole_or_refused():
    """A reader sees that the content was written since, or is being written, and that the token is another one."""
    segment = Segment(100)
    segment.begin()[:3] = b"abc"
    description = segment.end()
    mapped = Mapping(description)
    assert bytes(mapped.content()[:3]) == b"abc"
    assert mapped.holds(description[4])
    content = segment.begin()
    assert not mapped.holds(description[4])
    content[:3] = b"xyz"
    later = segment.end()
    assert not mapped.holds(description[4])
    assert mapped.holds(later[4])
    with pytest.raises(OSError, match="another segment"):
        Mapping((*description[:3], b"0" * 16, 1))
    with pytest.raises(OSError, match="No such file"):
        Mapping((description[0], 10_000, *description[2:]))
    segment.close()
    segment.close()
    assert bytes(mapped.content()[:3]) == b"xyz"


def test_segment_that_was_written_meanwhile_is_not_used():
    """A target that is late, so that the source has staged again, does not take the new bytes for the old ones."""
    ends = Ends([Worker({"a": np.ones(4)})], [Worker({"a": np.zeros(4)})])
    ends.plan()
    staged = ends.stage()
    ends.stage()
    (reply,) = ends.fetch(staged, 1)
    assert (reply.outcome, reply.source) == ("overwritten", 0)


def test_segment_that_was_written_before_the_commit_is_not_used():
    """A commit does not use memory that has been written since; new memory is staged while a target may still read."""
    ends = Ends([Worker({"a": np.ones(4)})], [Worker({"a": np.zeros(4)})])
    ends.plan()
    ends.fetch(ends.stage(), 1)
    ends.stage(fresh=True)
    assert ends.commit(1)[0].version == 1
    ends.fetch(ends.stage(), 2)
    ends.stage()
    assert ends.commit(2)[0].outcome == "missing"


def test_larger_segment_is_a_new_file():
    """A segment never shrinks or grows: readers of the old one keep what they have mapped."""
    source, target = Worker({"a": np.ones(4)}), Worker({"a": np.zeros(4)})
    ends = Ends([source], [target])
    ends.send(1)
    source.tensors, target.tensors = {"a": np.ones(4000)}, {"a": np.zeros(4000)}
    ends.send(2)
    assert target.tensors["a"].all()
    source.tensors, target.tensors = {"a": np.ones(3)}, {"a": np.zeros(3)}
    ends.send(3)
    assert target.tensors["a"].all()


def test_memory_of_ranks_that_have_left_is_unmapped():
    """When another rank sends what a rank had sent, nobody keeps the memory of the one that sends no more."""
    whole, target = np.arange(4.0), np.zeros(4)
    sources = [Worker({"w": LocalTensor(part, (4,), (2 * rank,))}) for rank, part in enumerate(np.split(whole, 2))]
    ends = Ends(sources, [Worker({"w": target})])
    before = count_segments()
    ends.send(0)
    assert count_segments() == before + 4  # two of sources, which the target maps
    sources[0].tensors, sources[1].tensors = {"w": whole + 1}, {}
    ends.send(1)
    assert count_segments() == before + 2
    assert np.array_equal(target, whole + 1)


def count_segments():
    """Return how often this process maps a segment."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:fairlead-transfer")


def test_unused_memory_is_given_back():
    """A smaller plan gives back the memory that it does not use, and another transport all of it."""

    def shared_bytes():
        """Return the bytes of the segments that this process has open; a map has the file open too."""
        gc.collect()
        return sum(os.fstat(descriptor).st_size for descriptor, name in open_files().items() if NAME in name)

    source, target = Worker({"w": np.ones(1 << 17)}), Worker({"w": np.zeros(1 << 17)})
    ends = Ends([source], [target])
    before, mapped_before = shared_bytes(), count_segments()
    ends.send(1)
    assert shared_bytes() - before > 1 << 20
    source.tensors, target.tensors = {"w": np.ones(1 << 10)}, {"w": np.zeros(1 << 10)}
    ends.send(2)
    assert shared_bytes() - before < 1 << 16
    assert count_segments() == mapped_before + 2  # of the source, and of the target
    ends.transport = "object_store"
    ends.plan()
    # Tasks that stage nothing yet.
    ends.ask("source", 0, "describe", ends.epoch, "weights", 0, ends.tasks.source[0], 0, False, False)
    assert count_segments() == mapped_before + 1
    gone = concurrent.futures.Future()
    gone.set_exception(ray.exceptions.RayError("it is gone"))
    staged = {0: Described(channels=[("object_store", types.SimpleNamespace(future=lambda: gone))])}
    (reply,) = ends.fetch(staged, 3)
    assert (reply.outcome, reply.source, reply.reason) == ("lost", 0, "it is gone")
    assert shared_bytes() == before


def test_platform_without_anonymous_files(monkeypatch):
    """Where Python has no `memfd_create`, as on macOS, the reply says why this process cannot share memory."""
    monkeypatch.delattr(os, "memfd_create")
    ends = Ends([Worker({"w": np.ones(3)})], [Worker({"w": np.zeros(3)})])
    ends.plan()
    with pytest.raises(RuntimeError, match=r"memfd_create.*give the link transport='object_store'"):
        ends.stage()


def test_memory_that_cannot_be_opened_is_reported():
    """If the memory of a source cannot be opened, the target says why, so that another transport is taken."""
    ends = Ends([Worker({"a": np.ones(4)})], [Worker({"a": np.zeros(4)})])
    ends.plan()
    staged = ends.stage()
    ((kind, description),) = staged[0].channels
    staged[0] = staged[0]._replace(channels=[(kind, (2**22 + 1, *description[1:]))])
    (reply,) = ends.fetch(staged, 1)
    assert (kind, reply.outcome, reply.source) == ("shared_memory", "lost", 0)
    assert "FileNotFoundError" in reply.reason
    assert "give the link transport='object_store'" in reply.reason


@pytest.mark.parametrize(
    ("values", "name", "text"),
    [
        ([1, 2], "", "must return a dict"),
        ({1: np.ones(2)}, "1", "must be a str"),
        ({"a": "text"}, "a", "builtins.str cannot be transferred"),
        ({"a": np.array(["x"], object)}, "a", "dtype object cannot"),
        ({"a": np.ma.array([1.0], mask=[True])}, "a", "masked array"),
        ({"a": LocalTensor(np.ones(2), (4,), (3,))}, "a", "outside of the global shape"),
        ({"a": LocalTensor(np.ones(2), (4, 4), (3,))}, "a", "has global_shape"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(values, name, text):
    """What a method returns is refused with the name and the reason."""
    ends = Ends([Worker(values)], [Worker({})])
    (reply,), _ = ends.describe()
    ((found, reason),) = reply.refused
    assert found == name
    assert text in reason


def test_methods_may_be_async():
    """The method that returns the tensors may be a coroutine."""

    class Async(Worker):
        async def weights(self):
            await asyncio.sleep(0)
            return self.tensors

    target = Async({"a": np.zeros(4)})
    Ends([Async({"a": np.ones(4)})], [target]).send(1)
    assert target.tensors["a"].all()


def test_digest_of_other_memory():
    """A tensor that is not in one piece has the digest of its bytes in order, and so has one that is cast."""
    tools, value = library("numpy"), np.asfortranarray(np.random.default_rng(0).standard_normal((70, 71)))
    assert digest(tools, value, "float64") == zlib.crc32(value.tobytes())
    assert digest(tools, value, "float32") == zlib.crc32(value.astype("float32").tobytes())


def selection(**changed):
    return Selection(**{"rename": lambda name: name, "dtype": None, "exclude": (), **changed})


def described(name, dtype="float32", shape=(4,), library="numpy"):
    return (name, library, dtype, 4, shape, (0,) * len(shape), shape)


def test_ranks_that_disagree_are_refused():
    """One tensor has one dtype and one global shape; two names do not become one; all are of one library."""
    with pytest.raises(LayoutMismatchError, match="disagree about its dtype or shape"):
        read_side("source", [[described("a")], [described("a", "float64")]], selection(), renamed=True)
    with pytest.raises(LayoutMismatchError, match="two tensors of the source have this name"):
        read_side("source", [[described("a"), described("b")]], selection(rename=lambda name: "x"), renamed=True)
    with pytest.raises(LayoutMismatchError, match="must be of one library"):
        read_side("target", [[described("a"), described("b", library="torch")]], selection(), renamed=False)


def test_dtypes_that_differ_are_refused():
    """Different dtypes need `dtype=`, which is for floating-point tensors."""
    held = read_side("source", [[described("a"), described("b", "int32")]], selection(), renamed=True)
    wanted = read_side("target", [[described("a", "bfloat16"), described("b", "int64")]], selection(), renamed=False)
    wrong = check_dtypes(held, wanted, selection())
    assert set(wrong) == {"a", "b"}
    assert "give the dtype that travels with dtype=" in wrong["a"].reason
    assert set(check_dtypes(held, wanted, selection(dtype="bfloat16"))) == {"b"}


def test_ends_need_neither_numpy_nor_torch_to_load():
    """The code of an end loads where there are only the standard library and Ray."""
    script = """
        import sys
        class Block:
            def find_spec(self, fullname, path=None, target=None):
                if fullname.partition(".")[0] in ("numpy", "torch", "fairlead_transfer", "fairlead_workergroup"):
                    raise ModuleNotFoundError(fullname, name=fullname)
        import ray
        sys.meta_path.insert(0, Block())
        for name in [name for name in sys.modules if name.partition(".")[0] in ("numpy", "torch")]:
            del sys.modules[name]
        print(ray.cloudpickle.loads(bytes.fromhex(sys.stdin.read())).__name__)
    """
    import ray

    from fairlead_transfer._remote.end import End

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        input=ray.cloudpickle.dumps(End).hex(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "End", done.stderr


def test_unknown_operation_of_a_missing_end():
    """Closing an end that does not exist does nothing."""
    from fairlead_transfer._remote.entry import SHARED, serve

    sys.modules[SHARED] = types.ModuleType(SHARED)
    assert serve(None, ("x", "source"), None, "close") is None


def test_tensors_that_move_before_the_commit():
    """Tensors that `before_commit` puts elsewhere, as a wake-up does, get the new values."""

    class Sleeping(Worker):
        def wake_up(self):
            self.tensors = {name: value.copy() for name, value in self.tensors.items()}

    target = Sleeping({"a": np.zeros(4)})
    Ends([Worker({"a": np.ones(4)})], [target]).send(1, before="wake_up")
    assert target.tensors["a"].tolist() == [1] * 4


def test_tensors_that_change_before_the_commit():
    """If `before_commit` leaves tensors that the new values do not fit, the version is not confirmed."""

    class Growing(Worker):
        def grow(self):
            self.tensors = {name: np.zeros(5) for name in self.tensors}

    target = Growing({"a": np.zeros(4)})
    ends = Ends([Worker({"a": np.ones(4)})], [target])
    ends.plan()
    ends.fetch(ends.stage(), 1)
    (reply,) = ends.commit(1, before="grow")
    assert "'a': 'another box or dtype'" in reply.error
    assert not reply.inconsistent
    assert not target.tensors["a"].any()


@pytest.mark.parametrize("kind", ["read-only", "broadcast", "overlapping"])
def test_targets_that_cannot_be_written(kind):
    """A target array that is read-only, or whose elements overlap, is refused by name before anything is decided."""
    values = np.zeros(8)
    values.flags.writeable = kind != "read-only"
    value = {
        "read-only": values,
        "broadcast": np.broadcast_to(np.zeros(1), (8,)),
        "overlapping": np.lib.stride_tricks.as_strided(values, (3, 4), (16, 8)),
    }[kind]
    refused = Ends([Worker({"a": np.ones(value.shape)})], [Worker({"a": value})]).refuse()
    assert [name for name, _ in refused] == ["a"]


@pytest.mark.parametrize("kind", ["copies", "some copies"])
def test_targets_that_return_copies(kind):
    """A target method that returns copies is refused by name: the new values would be lost with them."""

    class Copying(Worker):
        def weights(self):
            copied = self.tensors if kind == "copies" else ("a",)
            return {name: value.copy() if name in copied else value for name, value in self.tensors.items()}

    names = ["a", "b"] if kind == "copies" else ["a"]
    for _ in range(2):
        tensors = {name: np.zeros(4) for name in "ab"}
        refused = Ends([Worker({name: np.ones(4) for name in "ab"})], [Copying(tensors)]).refuse()
        assert [name for name, _ in refused] == names
        assert "copy" in refused[0][1]


def test_target_that_returns_copies_after_a_wake_up():
    """Copies that the target returns at the commit are refused too, and nothing is written."""

    class Copying(Worker):
        asleep = True

        def wake_up(self):
            self.asleep = False

        def weights(self):
            return self.tensors if self.asleep else {name: value.copy() for name, value in self.tensors.items()}

    ends = Ends([Worker({"a": np.ones(4)})], [Copying({"a": np.zeros(4)})])
    ends.plan()
    ends.fetch(ends.stage(), 1)
    (reply,) = ends.commit(1, before="wake_up")
    assert "returns a copy" in reply.error
    assert not reply.inconsistent


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (np.s_[:], np.s_[:2]),  # a fused tensor and a part of it
        (np.s_[:], np.s_[:]),  # tied tensors
        (np.s_[:2], np.s_[1:3]),
        (np.s_[:, :3], np.s_[:, 2:]),
        (np.s_[::2], np.s_[2:]),
        (np.s_[::-1], np.s_[3]),
    ],
)
def test_targets_that_overlap(first, second):
    """Two target tensors that share some elements are refused by name: the last one would win."""
    fused = np.zeros((4, 6))
    values = {"a": fused[first], "b": fused[second]}
    source = Worker({name: np.ones(value.shape) for name, value in values.items()})
    ((name, why),) = Ends([source], [Worker(values)]).refuse()
    assert f"shares some of its memory with {'b' if name == 'a' else 'a'!r}" in why
    assert not fused.any()
    Ends([source], [Worker(values)], exclude=("a",)).send(1)


def test_targets_that_only_interleave():
    """Parts of one tensor that share no element are written, although their memory interleaves."""
    fused = np.zeros((4, 6))
    values = {"a": fused[::2, :3], "b": fused[:, 3:], "c": fused[1::2, :3].T}
    sources = Worker(
        {name: np.full(value.shape, float(number)) for number, (name, value) in enumerate(values.items(), 1)}
    )
    Ends([sources], [Worker(values)]).send(1)
    assert fused.tolist() == [[1.0] * 3 + [2.0] * 3, [3.0] * 3 + [2.0] * 3] * 2


def test_segment_that_cannot_be_made(monkeypatch):
    """A segment for which there is no memory leaves no open file."""

    def fail(*args, **options):
        raise OSError("no memory")

    with leave_nothing(), monkeypatch.context() as patch:
        patch.setattr(segment.mmap, "mmap", fail)
        with pytest.raises(OSError, match="no memory"):
            Segment(4096)


def test_value_that_comes_at_the_deadline():
    """A value that arrives between the end of the wait and the look at it is returned."""

    class Arriving(concurrent.futures.Future):
        def result(self, timeout=None):
            try:
                return super().result(timeout)
            except TimeoutError:
                self.set_result("value")
                raise

    assert fetch_value(types.SimpleNamespace(future=Arriving), 0.0) == "value"


def test_names_with_brackets():
    """A name is excluded as it is, also one that is another pattern."""
    selection = Selection(str, None, ("layers[0].w", "head[12]"))
    assert [one for one in ("layers[0].w", "layers0.w", "head1", "head12") if selection.excludes(one)] == [
        "layers[0].w",
        "layers0.w",
        "head1",
    ]


@pytest.mark.parametrize("version", [-1, 2**63, 2**70])
def test_versions_that_a_record_cannot_hold(monkeypatch, version):
    """The worker's record shows no version then, and works on."""
    record = Record(["call"])
    monkeypatch.setitem(sys.modules, "_fairlead_worker", types.SimpleNamespace(record=record))
    note_weights(7)
    assert record._weights == 7
    note_weights(version)
    assert record._weights == NO_WEIGHTS
    note_weights(8)
    assert record._weights == 8
    os.close(record._file)
