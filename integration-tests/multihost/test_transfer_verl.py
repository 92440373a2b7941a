# SPDX-License-Identifier: Apache-2.0
"""Test of verl's own manager, groups and rollout workers with the checkpoint engine, over hosts of a cluster."""

import importlib.util

import pytest
import ray

from . import engine_main

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed: `nox -s verl` installs it", allow_module_level=True)

pytestmark = pytest.mark.nightly

SIZES = [600_000] * 4 + [3_000_001, 7]
MODULE = "fairlead_transfer.adapters.verl"


class Replica:
    """In place of a replica of the rollout, of which verl's manager needs the workers."""

    def __init__(self, workers):
        self.workers = workers

    def __getattr__(self, name):
        async def call(**options):
            pass

        return call


class Adapter:
    """In place of the part of verl that loads weights into an inference engine; it computes their digest."""

    async def update_weights(self, weights, **options):
        found = engine_main.hashlib.sha256()
        async for name, tensor in weights:
            engine_main.add_tensor(found, name, tensor)
        self.digest = found.hexdigest()


def test_manager_over_two_hosts(make_hosts):
    """verl's manager brings every tensor from two ranks on two hosts to four rollout workers there, again and again."""

    def driver(sizes, module, make_weights):
        import types

        from verl.checkpoint_engine import base
        from verl.single_controller.base import Worker
        from verl.single_controller.base.decorator import Dispatch, register
        from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
        from verl.workers.config import CheckpointEngineConfig

        kwargs = {"fairlead": {"timeout": 120.0}}
        config = CheckpointEngineConfig(
            backend="fairlead",
            update_weights_bucket_megabytes=4,
            engine_kwargs=kwargs,
            custom_backend_module=module,
        )

        class Trainer(Worker):
            """As verl's trainer, with weights instead of a model."""

            def __init__(self, rank):
                super().__init__()
                base.import_external_libs(module)
                new = base.CheckpointEngineRegistry.new
                self.checkpoint_engine = new("fairlead", bucket_size=4 << 20, is_master=rank == 0, **kwargs["fairlead"])

            @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
            def execute_checkpoint_engine(self, method, *args, **kwargs):
                return getattr(self.checkpoint_engine, method)(*args, **kwargs)

            @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
            async def update_weights(self, global_steps=None, mode="auto"):
                weights = make_weights(global_steps, sizes)
                return await self.checkpoint_engine.send_weights(weights, global_steps=global_steps) or {}

        class Rollout(base.CheckpointEngineWorker):
            def digest(self):
                return self.server_adapter.digest

        def start(cls, node, *args):
            """Start a worker on a node, with the environment that verl gives one that is alone."""
            env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
            affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
            options = {"runtime_env": {"env_vars": env}, "num_cpus": 1, "scheduling_strategy": affinity}
            return ray.remote(cls).options(**options).remote(*args)

        nodes = [node["NodeID"] for node in ray.nodes() if node["Resources"].get("CPU")]
        trainers = [start(Trainer, node, rank) for rank, node in enumerate(nodes)]
        rollout = types.SimpleNamespace(checkpoint_engine=config, name="rollout", mode="async")
        replicas = [Replica([start(Rollout, node, rollout, None, Adapter()) for _ in range(2)]) for node in nodes]
        actors = RayWorkerGroup(
            worker_handles=trainers, ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(Trainer))
        )
        manager = base.CheckpointEngineManager(config, actors, replicas)
        workers = [worker for replica in replicas for worker in replica.workers]
        for step in (1, 2):
            assert manager.update_weights(step) == {}
            yield ray.get([worker.digest.remote() for worker in workers], timeout=60)
        for worker in (*trainers, *workers):
            ray.kill(worker)

    ray.cloudpickle.register_pickle_by_value(engine_main)
    hosts = make_hosts()
    hosts.start_host(num_cpus=0)
    for _ in range(2):
        hosts.start_host(num_cpus=3)
    with hosts.driver(driver, SIZES, MODULE, engine_main.make_weights) as driving:
        for step in (1, 2):
            assert driving.step() == [engine_main.digest_weights(step, SIZES)] * 4
