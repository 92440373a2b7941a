# SPDX-License-Identifier: Apache-2.0
"""The transport by NIXL, between agents of this process and of others; skipped without the wheel."""

import contextlib
import copy
import gc
import importlib.util
import itertools
import re
import subprocess
import sys
import textwrap
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from fairlead_sharding import NamedSharding
from fairlead_transfer import LocalTensor
from fairlead_transfer._remote import tensors
from fairlead_transfer._remote.agent import MODULES, UCX, Agent, collapse, explain_missing
from fairlead_transfer._remote.entry import SHARED
from fairlead_transfer._remote.nixl import RUN_BYTES, Nixl
from fairlead_transfer._remote.tensors import Run, library
from fairlead_transfer._remote.transport import Late, Lost, Read

from ..ends import Ends
from .test_ends import Worker, same, shard, zeros

if explain_missing():
    pytest.skip(f"no NIXL: {explain_missing()}", allow_module_level=True)

pytestmark = pytest.mark.nightly

# Its rows are longer than what is packed, unless a dim is split.
SHAPE = 64, 2 * RUN_BYTES // 4


def close(ends):
    for (side, rank), end in ends.ends.items():
        end.serve(ends.workers[side][rank], "close", ())


@pytest.fixture
def values():
    rng = np.random.default_rng(0)
    return {"w": rng.random(SHAPE, "float32"), "b": rng.random(7), "s": rng.random(())}


@pytest.mark.parametrize(("source_dims", "target_dims"), [({0: "a"}, {1: "a"}), ({1: "a"}, {0: "a"}), ({}, {0: "a"})])
def test_reads(values, source_dims, target_dims):
    """Long runs are read from the tensors, others from a packed copy; tensors change from send to send."""
    mesh = NamedSharding.from_shape(a=2)
    sources = shard(values, mesh, {"w": source_dims})
    expected = shard(values, mesh, {"w": target_dims})
    ends = Ends(sources, zeros(expected), transport="nixl")
    for version in range(3):
        for worker in [*sources, *expected]:
            for local in worker.tensors.values():
                local.tensor[...] += 1
        ends.send(version)
        assert same(ends.workers["target"], expected)
    close(ends)


def test_relays(values):
    """What several ranks of another node want crosses to it once; the lowest rank relays it to the others."""
    whole = NamedSharding.from_shape(replica=4)
    sources, expected = shard(values, NamedSharding.from_shape(a=2), {"w": {0: "a"}}), shard(values, whole, {})
    ends = Ends(sources, zeros(expected), transport="nixl", nodes=(["a", "b"], ["b", "c", "c", "c"]))
    plan = ends.plan()
    assert set(ends.orders.target[0]["sources"]) == {0, 1}
    assert set(ends.orders.target[1]["sources"]) == {0, 1}
    for rank in (2, 3):
        assert set(ends.orders.target[rank]["sources"]) == {-2}
    assert ends.orders.bytes_between_nodes == plan.bytes_between_nodes
    for version in range(3):
        for worker in [*sources, *expected]:
            for local in worker.tensors.values():
                local.tensor[...] += 1
        ends.send(version)
        assert same(ends.workers["target"], expected)
    close(ends)


def test_digests_of_relayed_bytes(values):
    """A byte that differs from what the source has sent is found by the rank that gets it from another target rank."""
    sources = shard(values, NamedSharding.from_shape(a=1), {})
    expected = shard(values, NamedSharding.from_shape(replica=2), {})
    ends = Ends(sources, zeros(expected), transport="nixl", nodes=(["a"], ["b", "b"]))
    ends.plan()
    staged = ends.stage()
    staged[0]["staged"]["channels"][0]["digests"][0] ^= 1
    replies = ends.fetch(staged, 1)
    assert "differing" in replies[0]
    assert replies[1] == {"unstaged": -1}
    close(ends)


def test_buffers_are_kept(values):
    """Memory is registered again only when a tensor has moved; the reads are prepared once."""
    sources = shard(values, NamedSharding.from_shape(a=1), {})
    ends = Ends(sources, zeros(sources), transport="nixl")
    ends.send(1)
    (first,) = ends.stage().values()
    (again,) = ends.stage().values()
    kept, same_again = (one["staged"]["channels"][0]["staged"] for one in (first, again))
    assert kept == same_again
    local = sources[0].tensors["w"]
    moved = local.tensor + 1
    sources[0].tensors["w"] = LocalTensor(moved, local.global_shape, local.offsets)
    ends.send(2)
    (changed,) = ends.stage().values()
    assert changed["staged"]["channels"][0]["staged"]["number"] == kept["number"] + 1
    assert np.array_equal(ends.workers["target"][0].tensors["w"].tensor, moved)
    close(ends)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_staging_has_huge_pages(name):
    """Another process reads memory in huge pages in half the time, so the kernel is asked for them."""
    pytest.importorskip(name)
    if "madvise" not in (thp := Path("/sys/kernel/mm/transparent_hugepage/enabled")).read_text():
        pytest.skip(f"{thp} has no madvise")
    tools = library(name)
    buffer = tools.buffer(8 << 20, "cpu")
    address = tools.memory(buffer).address
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        begin, end = (int(at, 16) for at in mapping.split(maxsplit=1)[0].split("-"))
        if begin <= address + (4 << 20) < end:
            assert " hg" in mapping.partition("VmFlags:")[2]
            return
    pytest.fail("the buffer is not mapped")


def test_options_of_ucx():
    """UCX has the options that it is given; it ignores others without a word."""
    module = next(name for name in MODULES if importlib.util.find_spec(name))
    (library,) = Path(importlib.util.find_spec(module).origin).parents[1].glob(f"{module}.libs/ucx/libuct_cuda.so*")
    for option in UCX.split(","):
        name, _, _ = option.removeprefix("CUDA_IPC_").partition("=")
        assert f"\0{name}\0".encode() in library.read_bytes()


def read_until(agent, handles, deadline):
    """Read again and again: the death of a process shows a moment later."""
    while time.monotonic() < deadline:
        agent.read(handles, deadline)


def test_dead_source():
    """A source that is dead is lost, whether an exception or a state says so; its memory is read no more."""
    script = """
        import sys
        import numpy as np
        from fairlead_transfer._remote.agent import Agent
        from fairlead_transfer._remote.tensors import library
        agent, array = Agent(), np.arange(1 << 16, dtype="uint8")
        agent.serve(busy=True)
        agent.register("it", library("numpy"), [array])
        print(agent.name, agent.metadata().hex(), array.ctypes.data, flush=True)
        sys.stdin.read()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    agent, tools = Agent(), library("numpy")
    try:
        name, metadata, address = process.stdout.readline().split()
        into = np.zeros(1 << 16, "uint8")
        agent.register("mine", tools, [into])
        agent.connect(0, name, bytes.fromhex(metadata))
        moves = [(Run("cpu", int(address), (1,)), Run("cpu", into.ctypes.data, (1,)), into.shape, 1)]
        handles = agent.prepare(0, moves)
        agent.read(handles, time.monotonic() + 30)
        assert into[77] == 77
        assert not agent.is_writing(handles)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    with pytest.raises(Lost):
        read_until(agent, handles, time.monotonic() + 30)
    agent.release(handles, "mine")
    agent.disconnect(0)
    agent.close()


@pytest.mark.parametrize("end", ["agent.close()", "sys.exit()"])
def test_end_after_the_death_of_a_source(run_python, end):
    """A process survives the end of its agent after a source has died, which UCX aborted in one of ten cases."""
    script = f"""
        import os
        import signal
        import sys
        import time
        import numpy as np
        from fairlead_transfer._remote.agent import Agent
        from fairlead_transfer._remote.tensors import Run, library
        from fairlead_transfer._remote.transport import Lost

        def be_source(end):
            agent, array = Agent(), np.arange(1 << 16, dtype="uint8")
            agent.serve(busy=True)
            agent.register("it", library("numpy"), [array])
            os.write(end, f"{{agent.name}} {{agent.metadata().hex()}} {{array.ctypes.data}}\\n".encode())
            signal.alarm(60)
            signal.pause()

        def be_target(end, source):
            agent, into = Agent(), np.zeros(1 << 16, "uint8")
            name, metadata, address = os.fdopen(end).readline().split()
            agent.register("mine", library("numpy"), [into])
            agent.connect(0, name, bytes.fromhex(metadata))
            moves = [(Run("cpu", int(address), (1,)), Run("cpu", into.ctypes.data, (1,)), into.shape, 1)]
            handles = agent.prepare(0, moves)
            agent.read(handles, time.monotonic() + 30)
            os.kill(source, signal.SIGKILL)
            os.waitpid(source, 0)
            try:
                while True:
                    agent.read(handles, time.monotonic() + 30)
            except Lost:
                agent.release(handles, "mine")
            {end}

        def run():
            ends = os.pipe()
            if (source := os.fork()) == 0:
                be_source(ends[1])
            be_target(ends[0], source)

        statuses = []
        for _ in range(15):
            if (target := os.fork()) == 0:
                run()
                sys.exit()
            statuses.append(os.waitpid(target, 0)[1])
        print(set(statuses))
    """
    assert run_python(script).splitlines()[-1] == "{0}"  # after warnings of UCX


def test_exit_with_an_open_agent(run_python):
    """A process that exits without closing its agent ends the agent's thread first, which NIXL may not survive."""
    script = """
        import atexit
        import threading
        from fairlead_transfer._remote.agent import Agent

        def show():
            print([thread.name for thread in threading.enumerate() if "nixl" in thread.name])

        atexit.register(show)  # runs last
        agent = Agent()
        agent.serve(busy=True)
        show()
    """
    assert run_python(script).split() == ["['fairlead-transfer", "nixl']", "[]"]


@pytest.mark.parametrize("answer", ["ERR", RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")])
def test_both_ways_in_which_a_transfer_fails(answer, monkeypatch):
    """An error state and an exception both mean that the source is lost, and that nothing is written any more."""

    class Failing:
        def check_xfer_state(self, handle):
            if isinstance(answer, str):
                return answer
            raise answer

        def transfer(self, handle):
            return self.check_xfer_state(handle)

    agent = Agent()
    with monkeypatch.context() as patch:
        patch.setattr(agent, "_nixl", Failing())
        with pytest.raises(Lost, match=r"has failed|DISCONNECT"):
            agent.read([(1, None, None)], time.monotonic() + 1)
        assert not agent.is_writing([(1, None, None)])
    agent.close()


class Slow:
    """NIXL whose transfers do not end until `ended` is set; `transfer` raises `error` if there is one."""

    def __init__(self, nixl, error=None):
        self.nixl, self.error, self.ended = nixl, error, False

    def __getattr__(self, name):
        return getattr(self.nixl, name)

    def transfer(self, handle):
        if self.error is not None:
            raise self.error
        return "PROC"

    def check_xfer_state(self, handle):
        return "DONE" if self.ended else "PROC"


class Recording(Slow):
    """NIXL that notes the order in which things are given back."""

    def __init__(self, nixl, error=None):
        super().__init__(nixl, error)
        self.order = []

    def __getattr__(self, name):
        if name.startswith(("release", "deregister", "remove")):
            self.order.append(name)
        return super().__getattr__(name)


@pytest.fixture
def reader(values):
    """Return a transport that has read once, with the arguments of `fetch` up to the deadline."""
    sources = shard(values, NamedSharding.from_shape(a=1), {})
    ends = Ends(sources, zeros(sources), transport="nixl")
    ends.send(0)
    staged = ends.stage()[0]["staged"]["channels"][0]["staged"]
    ((ordered,),) = (one.values() for one in vars(ends.ends["target", 0])["_orders"]["sources"].values())
    wanted = [one for *_, one in ordered]
    nixl = Nixl()
    arguments = library("numpy"), 0, 0, staged, wanted, 1
    nixl.fetch(Read(*arguments, time.monotonic() + 30))
    yield nixl, arguments
    nixl.close()
    close(ends)


@pytest.mark.parametrize("commit", ["staged", "in_place"])
def test_late_reads_keep_their_memory(reader, commit, monkeypatch):
    """Memory that a late read may still write is left to it; the next send uses other memory."""
    nixl, arguments = reader
    into = [np.zeros(one.sizes, one.dtype) for one in arguments[4]] if commit == "in_place" else None
    first = nixl.fetch(Read(*arguments, time.monotonic() + 30, into))
    agent = vars(nixl)["_agent"]
    slow = Slow(vars(agent)["_nixl"])
    with monkeypatch.context() as patch:
        patch.setattr(agent, "_nixl", slow)
        with pytest.raises(Late):
            nixl.fetch(Read(*arguments, time.monotonic() + 0.2, into))
        assert nixl.is_writing()
        assert nixl.is_torn() == (commit == "in_place")
    late = vars(sys.modules[SHARED])["late"]
    (kept,) = late
    late.clear()  # so that its state is not asked for
    again = nixl.fetch(Read(*arguments, time.monotonic() + 30, into))
    if commit == "staged":
        assert all(one.ctypes.data != other.ctypes.data for one, other in zip(first, again, strict=True))
    with monkeypatch.context() as patch:
        patch.setattr(agent, "_nixl", slow)
        late.append(kept)
        assert nixl.is_writing()
        slow.ended = True
        assert not nixl.is_writing()
        assert not nixl.is_torn()
    assert late == []


def test_transfers_are_given_back_first(reader, monkeypatch):
    """NIXL may abort if a transfer outlives its memory or its connection."""
    nixl, arguments = reader
    agent = vars(nixl)["_agent"]
    recording = Recording(vars(agent)["_nixl"], RuntimeError("NIXL_ERR_REMOTE_DISCONNECT"))
    recording.ended = True
    with monkeypatch.context() as patch:
        patch.setattr(agent, "_nixl", recording)
        with pytest.raises(Lost):
            nixl.fetch(Read(*arguments, time.monotonic() + 30))
    steps = [name for name, _ in itertools.groupby(recording.order)]
    assert steps == ["release_xfer_handle", "release_dlist_handle", "deregister_memory", "remove_remote_agent"]


def test_interrupted_reads_keep_their_memory(reader, monkeypatch):
    """Also a read that something else than its deadline has ended may still write."""
    nixl, arguments = reader
    agent = vars(nixl)["_agent"]
    slow = Slow(vars(agent)["_nixl"], error=KeyboardInterrupt())
    with monkeypatch.context() as patch:
        patch.setattr(agent, "_nixl", slow)
        with pytest.raises(KeyboardInterrupt):
            nixl.fetch(Read(*arguments, time.monotonic() + 30))
        assert nixl.is_writing()
        slow.ended = True
        assert not nixl.is_writing()


def test_closed_end_gives_everything_back_when_its_late_reads_have_ended(reader, monkeypatch, eventually):
    """A link may be closed while a read is late; its agent goes when the read has ended."""
    nixl, arguments = reader
    agent = vars(nixl)["_agent"]
    slow = Slow(vars(agent)["_nixl"])
    with monkeypatch.context() as patch:
        patch.setattr(agent, "_nixl", slow)
        with pytest.raises(Late):
            nixl.fetch(Read(*arguments, time.monotonic() + 0.2))
        nixl.close()
        assert vars(agent)["_peers"] != {}
        slow.ended = True
        assert eventually(lambda: vars(agent)["_peers"] == {})
    assert vars(agent)["_registered"] == {}
    assert vars(sys.modules[SHARED])["late"] == []


def test_torch():
    """Torch tensors are read in the same way, also with a cast at the source."""
    torch = pytest.importorskip("torch")
    source = {"w": torch.rand(SHAPE), "b": torch.rand(7, dtype=torch.float64), "n": torch.arange(3)}
    target = {name: torch.zeros_like(value) for name, value in source.items()}
    halves = {name: torch.zeros(value.shape, dtype=torch.bfloat16) for name, value in source.items() if name != "n"}
    ends = Ends([Worker(source)], [Worker(target)], transport="nixl")
    for version in range(2):
        source["w"] += 1
        ends.send(version)
        assert all(torch.equal(target[name], value) for name, value in source.items())
    close(ends)
    ends = Ends([Worker(source)], [Worker(halves)], transport="nixl", dtype="bfloat16", exclude=("n",))
    ends.send(1)
    assert all(torch.equal(value, source[name].to(torch.bfloat16)) for name, value in halves.items())
    close(ends)


def test_gathered_parameters_are_read_from_a_copy(make_ends, monkeypatch):
    """FSDP2 frees what it has gathered, so a read that is late must not need that memory."""
    torch = pytest.importorskip("torch")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=1)
    try:
        model = fully_shard(torch.nn.Linear(RUN_BYTES // 4, 8), mesh=init_device_mesh("cpu", (1,)))
        target = {name: torch.zeros(one.shape) for name, one in model.named_parameters()}
        source = Worker({})
        ends = make_ends([source], [Worker(target)])
        for version, is_gathered in enumerate((False, True), 1):
            if is_gathered:
                with torch.no_grad():
                    model(torch.zeros(1, RUN_BYTES // 4))
                    target["weight"].zero_()
            source.tensors = {name: one.detach() for name, one in model.named_parameters()}
            expected = {name: (getattr(one, "_local_tensor", one) + 0) for name, one in source.tensors.items()}
            ends.plan()
            staged = ends.stage()
            model.reshard()
            (reply,) = ends.fetch(staged, version)
            assert "bytes" in reply, reply
            ends.commit(version)
            assert all(torch.equal(target[name], value) for name, value in expected.items())
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def make_ends():
    """Return a function that makes ends that read by NIXL, and are closed even if the test fails."""
    with contextlib.ExitStack() as stack:

        def make(sources, targets, **options):
            ends = Ends(sources, targets, transport="nixl", **options)
            stack.callback(close, ends)
            return ends

        yield make


def commit_in_place(ends, version=1):
    """Read into the tensors of the target; return the reply of rank 0."""
    staged = ends.stage()
    reading = ends.orders.target[0], ends.orders.number, staged, True, 30.0
    return ends.ask("target", 0, "commit", ends.epoch, version, None, None, None, 1 << 30, reading)


@pytest.mark.parametrize("commit", ["staged", "in_place"])
def test_tensors_that_touch(commit, make_ends):
    """Tensors that are views of one buffer, as in Megatron-Core and in buckets, are read."""
    half = RUN_BYTES
    sent, received = np.arange(2 * half, dtype="float32"), np.zeros(2 * half, "float32")
    sources, targets = (Worker({"a": one[:half], "b": one[half:]}) for one in (sent, received))
    ends = make_ends([sources], [targets])
    ends.plan()
    if commit == "staged":
        (reply,) = ends.fetch(ends.stage(), 1)
        assert "bytes" in reply
        (reply,) = ends.commit(1)
    else:
        reply = commit_in_place(ends)
    assert reply.get("committed") == 1
    assert np.array_equal(received, sent)


def test_relays_from_sources_whose_memory_touches(monkeypatch, make_ends):
    """A rank relays what it has fetched from two sources, wherever the kernel has put the memory for both."""
    free = memoryview(bytearray(1 << 22))

    def take_last(length):
        """Return memory right before what was returned last, as the kernel does."""
        nonlocal free
        free, taken = free[:-length], free[-length:]
        return taken

    monkeypatch.setattr(tensors, "_host_memory", take_last)
    values = {"w": np.random.default_rng(0).random((4, 1 << 16), "float32")}  # 512 KiB from each source
    sources = shard(values, NamedSharding.from_shape(a=2), {"w": {0: "a"}})
    expected = shard(values, NamedSharding.from_shape(replica=2), {})
    ends = make_ends(sources, zeros(expected), nodes=(["a", "b"], ["c", "c"]))
    ends.plan()
    assert set(ends.orders.target[1]["sources"]) == {-1}
    replies = ends.fetch(ends.stage(), 1)
    assert all("bytes" in reply for reply in replies)


def test_reversed_target_in_place(make_ends):
    """A target whose elements go backwards in memory is read into; or it is refused by name before the decision."""
    sent, received = np.arange(RUN_BYTES, dtype="float32"), np.zeros(RUN_BYTES, "float32")
    ends = make_ends([Worker({"a": sent})], [Worker({"a": received[::-1]})])
    _, (described,) = ends.describe()
    if "refused" in described:
        assert described["refused"][0][0] == "a"
        return
    ends.plan()
    reply = commit_in_place(ends)
    assert reply.get("committed") == 1
    assert np.array_equal(received[::-1], sent)


def test_dropped_tensors_are_freed(make_ends):
    """When a send has ended, a link holds no reference to tensors of the user."""
    ends = make_ends([Worker({"a": np.ones(RUN_BYTES)})], [Worker({"a": np.zeros(RUN_BYTES)})])
    ends.send(1)
    held = [weakref.ref(workers[0].tensors["a"]) for workers in ends.workers.values()]
    for side, workers in ends.workers.items():
        ends.ask(side, 0, "release", ends.epoch, False)
        workers[0].tensors = {}
    gc.collect()
    alive = [one() is not None for one in held]
    assert alive == [False, False]


@pytest.mark.parametrize("kind", ["array", "freed", "resized"])
def test_registration_ends_with_the_memory(kind, make_ends, monkeypatch):
    """Memory of torch stays registered as long as it exists; that of an array is given back after each send."""
    torch = pytest.importorskip("torch")
    made = np.ones(RUN_BYTES) if kind == "array" else torch.ones(RUN_BYTES)
    ends = make_ends([Worker({"a": made})], [Worker({"a": copy.deepcopy(made)})])
    ends.send(1)
    agent = ends.ends["source", 0]._nixl._agent
    register, registered = agent._nixl.register_memory, []
    monkeypatch.setattr(agent._nixl, "register_memory", lambda *args: registered.append(args) or register(*args))
    ends.ask("source", 0, "release", ends.epoch, False)
    agent._give_back_freed()
    assert ("tensors" in agent._registered) == (kind != "array")
    ends.describe()
    ends.stage()
    assert len(registered) == (kind == "array")
    ends.ask("source", 0, "release", ends.epoch, False)
    if kind == "resized":
        made.untyped_storage().resize_(0)
    else:
        ends.workers["source"][0].tensors = {}
        del made
    agent._give_back_freed()
    assert "tensors" not in agent._registered


def test_scattered_targets_in_place(make_ends, monkeypatch):
    """A target whose elements lie one by one is read into memory in one piece, and copied from there."""
    rows = 300
    sent, received = np.random.default_rng(0).random((rows, rows)), np.zeros((rows, rows))
    ends = make_ends([Worker({"a": sent})], [Worker({"a": received.T})])
    ends.plan()
    prepare, reads = Agent.prepare, []

    def count(agent, source, moves):
        for origin, target, sizes, itemsize in moves:
            reads.append(len(collapse(sizes, itemsize, origin.strides, target.strides)[1]))
        return prepare(agent, source, moves)

    monkeypatch.setattr(Agent, "prepare", count)
    assert commit_in_place(ends).get("committed") == 1
    assert np.array_equal(received.T, sent)
    assert reads == [0]  # no dim over the run


def test_refused_descriptions(make_ends, monkeypatch):
    """If NIXL refuses a description of memory, the pair of ranks cannot use it; nobody is lost."""
    refusal = type("nixlNotFoundError", (Exception,), {})("NIXL_ERR_NOT_FOUND")

    def refuse(*_):
        raise refusal

    ends = make_ends([Worker({"a": np.ones(RUN_BYTES)})], [Worker({"a": np.zeros(RUN_BYTES)})])
    ends.plan()
    staged = ends.stage()
    monkeypatch.setattr(Agent, "prepare", refuse)
    (reply,) = ends.fetch(staged, 1)
    assert reply == {"blocked": {0: ("nixl", "nixlNotFoundError: NIXL_ERR_NOT_FOUND")}}


@pytest.mark.parametrize("then", ["stage(1, tensors)", "stage(2, [*tensors, tensors[1][::2]])", "tensors.clear()"])
def test_stopped_source_answers_late_reads(run_python, then):
    """Over TCP a source that was stopped answers late reads from its memory; it crashed if that was given back."""
    script = f"""
        import multiprocessing
        import os
        import time
        import numpy as np
        from fairlead_transfer._remote.agent import Agent
        from fairlead_transfer._remote.nixl import Nixl
        from fairlead_transfer._remote.tensors import library
        from fairlead_transfer._remote.transport import Block, Late, Read, Wanted, Write

        tools = library("numpy")
        here, there = multiprocessing.Pipe()

        def be_source():
            Agent.serve = lambda agent, *, busy: None  # it makes progress only where this function has it
            nixl, tensors = Nixl(), [np.ones(1 << 19), np.ones(1 << 19)[::2]]

            def stage(order, tensors, fresh=True):
                blocks = [Block(one, (slice(None),), "float64", one.shape, 0) for one in tensors]
                return nixl.stage(Write(tools, 0, 0, blocks, order, fresh))

            def answer_reads():
                while not there.poll(0.001):
                    vars(nixl)["_agent"]._nixl.get_new_notifs()
                return there.recv()

            there.send(stage(1, tensors, fresh=False))
            assert answer_reads() == "stop"
            there.send("stopped")
            assert there.recv() == "continue"
            # What it was asked for while it was stopped.
            nixl.keep_read(late=True)
            nixl.release()
            {then}
            nixl.keep_read(late=True)
            nixl.release()
            assert answer_reads() == "end"
            nixl.keep_read(late=False)
            nixl.close()

        if (source := os.fork()) == 0:
            be_source()
            os._exit(0)
        nixl, staged = Nixl(), here.recv()
        wanted = [Wanted(0, 0, (1 << 19,), "float64", None, "cpu"), Wanted(1, 0, (1 << 18,), "float64", None, "cpu")]

        def read(within_s):
            return nixl.fetch(Read(tools, 0, 0, staged, wanted, 1, time.monotonic() + within_s))

        assert [one.sum() for one in read(30)] == [1 << 19, 1 << 18]
        here.send("stop")
        assert here.recv() == "stopped"
        try:
            print(read(0.5))
        except Late:
            here.send("continue")
        deadline = time.monotonic() + 30
        while nixl.is_writing() and time.monotonic() < deadline:
            time.sleep(0.01)
        here.send("end")
        print(os.waitpid(source, 0)[1], nixl.is_writing())
        nixl.close()
    """
    assert run_python(script, UCX_TLS="tcp").split() == ["0", "False"]
