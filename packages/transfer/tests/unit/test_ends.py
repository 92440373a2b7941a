# SPDX-License-Identifier: Apache-2.0
"""What the ends of a link do in the workers, on numpy arrays and torch tensors."""

import asyncio
import random
import subprocess
import sys
import textwrap
import types

import numpy as np
import pytest
import ray

from fairlead_sharding import NamedSharding
from fairlead_transfer import Layout, LocalTensor
from fairlead_transfer._remote.entry import SHARED
from fairlead_transfer._remote.replies import Committed

from ..ends import Ends, Worker
from ..engines import leave_nothing

MODEL = {"embed": (12, 8), "norm": (5,), "step": (), "deep": (2, 3, 4, 5), "none": (0, 3)}


def model(dtype="float32"):
    rng = np.random.default_rng(0)
    return {name: (rng.random(shape) * 100).astype(dtype) for name, shape in MODEL.items()}


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
            assert ends.send(2) == ends.plan().bytes_moved
            assert same(ends.workers["target"], expected)
            ends.close()
            del ends
            sys.modules.pop(SHARED)


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


class Waiting(Worker):
    """Waits in the first of its methods until it is resumed."""

    async def pause(self):
        if not self.inside.is_set():
            self.inside.set()
            await self.resumed.wait()

    async def load(self, tensors):
        await self.pause()
        super().load(tensors)


@pytest.mark.parametrize(
    ("before", "apply", "later", "outcomes", "left"),
    [
        ("pause", None, "release", ["superseded"], 0),
        ("pause", None, "commit", ["superseded", "done"], 2),
        (None, "load", "commit", ["done", "done"], 2),
    ],
)
def test_commit_while_a_later_attempt_passes(before, apply, later, outcomes, left):
    """A late commit writes nothing that a later attempt has staged, drops none of it, and mixes with no other one."""
    source, target = Worker({}), Waiting({name: np.zeros(4) for name in "ab"})
    ends = Ends([source], [target], apply=apply)

    def stage(version):
        source.tensors = {name: np.full(4, float(version)) for name in "ab"}
        ends.plan()
        assert ends.fetch(ends.stage(fresh=True), version)[0].outcome == "done"
        if later == "release" and version == 2:
            ends.ask("target", 0, "release", ends.epoch)

    def start(version):
        args = ends.epoch, version, before, None, apply, 1
        return asyncio.create_task(ends.ends["target", 0].serve(target, "commit", args))

    async def commit():
        target.inside, target.resumed = asyncio.Event(), asyncio.Event()
        commits = [start(1)]
        await target.inside.wait()
        await asyncio.to_thread(stage, 2)
        commits += [start(2)] if later == "commit" else []
        for _ in range(100):
            await asyncio.sleep(0)
        target.resumed.set()
        return [Committed(*reply).outcome for reply in await asyncio.gather(*commits)]

    stage(1)
    assert asyncio.run(commit()) == outcomes
    assert [target.tensors[name].tolist() for name in "ab"] == [[left] * 4] * 2


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
def test_interrupted_commit(error):
    """An end whose commit was interrupted or cancelled midway does not call the version committed when asked again."""
    ends = Ends([Worker({"a": np.ones(4), "b": np.ones(4)})], [Worker({})], apply="load")
    ends.send(1, chunk_bytes=8)
    ends.plan()
    ends.fetch(ends.stage(), 2)

    def load(tensors):
        raise error

    ends.workers["target"][0].load = load
    with pytest.raises(error):
        ends.commit(2, chunk_bytes=8)
    assert ends.commit(2, chunk_bytes=8)[0].outcome == "missing"


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


def test_methods_may_be_async():
    """The method that returns the tensors may be a coroutine."""

    class Async(Worker):
        async def weights(self):
            await asyncio.sleep(0)
            return self.tensors

    target = Async({"a": np.zeros(4)})
    Ends([Async({"a": np.ones(4)})], [target]).send(1)
    assert target.tensors["a"].all()


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
