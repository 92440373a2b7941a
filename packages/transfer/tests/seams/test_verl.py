# SPDX-License-Identifier: Apache-2.0
"""The engine under the real base class, registry and manager of verl 0.9.1; the workers are threads."""

import asyncio
import inspect
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace

import pytest

from fairlead_transfer import TransferError

from ..engines import digest, find_left, make_weights

pytestmark = pytest.mark.nightly

MODULE = "fairlead_transfer.adapters.verl"


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


def test_manager(manager):
    """verl's manager brings every tensor to every rollout worker, again and again, and nothing is left."""
    found = {}

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
