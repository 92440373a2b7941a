# SPDX-License-Identifier: Apache-2.0
"""The engine under the real base class, registry and manager of verl 0.9.1; the workers are threads."""

import asyncio
import inspect
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace

import pytest

from fairlead_transfer import TransferError
from fairlead_transfer.adapters import _members

from ..engines import digest, find_left, make_weights

pytestmark = pytest.mark.nightly

MODULE = "fairlead_transfer.adapters.verl"
HOSTS = Path(__file__).parents[4] / "integration-tests"


class Group:
    """In place of verl's worker group: a call of each worker returns what `get` below waits for."""

    def __init__(self, engines, update, threads):
        self.engines, self.update, self.threads = engines, update, threads
        self.world_size = len(engines)

    def execute_checkpoint_engine(self, method, **kwargs):
        calls = [{key: values[at] for key, values in kwargs.items()} for at in range(self.world_size)]
        return [
            self.threads.submit(getattr(engine, name), **call)
            for engine, name, call in zip(self.engines, method, calls, strict=True)
        ]

    def update_weights(self, global_steps, mode=None):
        return [
            self.threads.submit(asyncio.run, self.update(at, one, global_steps)) for at, one in enumerate(self.engines)
        ]


class Replica:
    """In place of a replica of the rollout: it notes what the manager has called."""

    def __init__(self, workers):
        self.workers, self.calls = workers, []

    def __getattr__(self, name):
        async def call(**options):
            self.calls.append(name)

        return call


@pytest.fixture
def manager(verl_base, monkeypatch):
    """Return a maker of verl's manager over 2 ranks of a trainer and 2 replicas with 2 workers each."""
    with ThreadPoolExecutor(6) as threads:

        def make(send, receive, timeout=20.0):
            config = SimpleNamespace(backend="fairlead", custom_backend_module=MODULE)
            made = []

            def new(**options):
                # As verl's workers do.
                made.append(verl_base.CheckpointEngineRegistry.new("fairlead", **options))
                return made[-1]

            monkeypatch.setattr(verl_base.CheckpointEngineRegistry, "_registry", {})
            sys.modules.pop(MODULE, None)
            manager = verl_base.CheckpointEngineManager(config, None, [])
            options = {"bucket_size": 64 << 10, "timeout": timeout}
            manager.actor_wg = Group([new(is_master=at == 0, **options) for at in range(2)], send, threads)
            manager.replicas = [Replica([new(**options) for _ in range(2)]) for _ in range(2)]

            def make_group(worker_handles, ray_cls_with_init):
                return Group(worker_handles, receive, threads)

            def get(futures):
                wait(futures, 60)  # all of them, so that what is left is left for good
                return [one.result(0) for one in futures]

            monkeypatch.setattr(verl_base, "RayWorkerGroup", make_group)
            monkeypatch.setattr(verl_base.ray, "get", get)
            return manager, made

        yield make


def test_base_class(verl_base):
    """The engine has every abstract method of verl's class, with the arguments that verl passes."""
    sys.modules.pop(MODULE, None)
    verl_base.import_external_libs(MODULE)
    engine = verl_base.CheckpointEngineRegistry.get("fairlead")
    assert issubclass(engine, verl_base.CheckpointEngine)
    assert not engine.__abstractmethods__
    for name in verl_base.CheckpointEngine.__abstractmethods__ - {"init_process_group"}:
        ours, theirs = (inspect.signature(getattr(one, name)) for one in (engine, verl_base.CheckpointEngine))
        assert list(ours.parameters) == list(theirs.parameters), name


@pytest.mark.parametrize("nodes", ["a", "ab"])
def test_manager(manager, monkeypatch, nodes):
    """verl's manager brings every tensor to every rollout worker, again and again, and nothing is left.

    With two nodes the engines believe that they cannot share memory with half of the others.
    """
    found, names = {}, itertools.cycle(nodes)
    monkeypatch.setattr(_members, "find_node", lambda: next(names))

    async def send(rank, engine, step):
        await engine.send_weights(iter(make_weights(step, scale=5003)), global_steps=step)

    async def receive(rank, engine, step):
        found[rank] = [(name, digest(tensor)) async for name, tensor in engine.receive_weights(global_steps=step)]

    driver, _ = manager(send, receive)
    for step in (1, 2):
        found.clear()
        assert driver.update_weights(step) == {}
        expected = [(name, digest(tensor)) for name, tensor in make_weights(step, scale=5003)]
        assert [found[rank] for rank in range(4)] == [expected] * 4
    assert driver.replicas[0].calls[:4] == [
        "abort_all_requests",
        "release_kv_cache",
        "resume_kv_cache",
        "resume_generation",
    ]
    assert find_left() == []


def test_failing_consumer(manager):
    """When one rollout worker fails, verl's manager raises, and nothing is left."""

    async def send(rank, engine, step):
        await engine.send_weights(iter(make_weights(step, scale=5003)), global_steps=step)

    async def receive(rank, engine, step):
        async for name, _ in engine.receive_weights(global_steps=step):
            if rank == 1 and name == "layer5":
                raise RuntimeError("it cannot load this")

    driver, engines = manager(send, receive)
    with pytest.raises(TransferError, match=r"target rank 1 on node .*its consumer stopped reading") as caught:
        driver.update_weights(7)
    assert caught.value.version == 7
    for engine in engines:
        engine.finalize()
    assert find_left() == []


class HostGroup:
    """In place of verl's worker group: the workers are processes on several hosts."""

    def __init__(self, processes, options=None, sizes=()):
        self.processes, self.options, self.sizes = processes, options, sizes
        self.world_size = len(processes)

    def execute_checkpoint_engine(self, method, **kwargs):
        for at, (process, name) in enumerate(zip(self.processes, method, strict=True)):
            if name == "prepare":
                process.begin("prepare", "verl", self.options)
            else:
                process.begin("call", name, **{key: values[at] for key, values in kwargs.items()})
        return self.processes

    def update_weights(self, global_steps, mode=None):
        for process in self.processes:
            process.begin(*(("send", global_steps, self.sizes) if mode else ("receive",)))
        return self.processes


def test_manager_over_two_hosts(verl_base, monkeypatch):
    """verl's manager brings every tensor from 2 ranks on two hosts to 4 rollout workers there, again and again."""
    if not HOSTS.is_dir():
        pytest.skip("the tests on several hosts are not here: use a checkout")
    monkeypatch.syspath_prepend(str(HOSTS))
    from multihost import engine_main, network
    from multihost.engines import EngineHosts

    if reason := network.explain_unavailable():
        pytest.skip(reason)
    sizes, results, options = [600_000] * 4 + [3_000_001, 7], [], {"bucket_size": 4 << 20, "timeout": 60.0}

    def get(processes):
        results[:] = [process.end(120) for process in processes]
        assert not [result for result in results if isinstance(result, BaseException)], results
        return list(results)

    def update(driver, step):
        """Update the weights; return what the rollout workers have got."""
        received = []
        monkeypatch.setattr(verl_base.ray, "get", lambda processes: received.append(get(processes)) or received[-1])
        assert driver.update_weights(step) == {}
        return received[-2][2:]  # before all are finalized

    monkeypatch.setattr(verl_base.CheckpointEngineRegistry, "_registry", {})
    sys.modules.pop(MODULE, None)
    with network.Network() as made:
        hosts = EngineHosts(made, (3, 3))
        try:
            (first, *near), (second, *far) = hosts.processes
            driver = verl_base.CheckpointEngineManager(
                SimpleNamespace(backend="fairlead", custom_backend_module=MODULE), None, []
            )
            driver.actor_wg = HostGroup([first, second], options, sizes)
            driver.replicas = [Replica(near), Replica(far)]

            def make_group(worker_handles, ray_cls_with_init):
                return HostGroup(worker_handles, options)

            monkeypatch.setattr(verl_base, "RayWorkerGroup", make_group)
            for step in (1, 2):
                assert update(driver, step) == [engine_main.digest_weights(step, sizes)] * 4
        finally:
            hosts.close()
