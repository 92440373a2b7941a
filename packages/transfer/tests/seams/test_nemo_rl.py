# SPDX-License-Identifier: Apache-2.0
"""The engine under NeMo RL's own base class from a checkout, made as NeMo RL makes it."""

import asyncio
import inspect
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from ..engines import digest, find_left, make_weights, put_stand_in

pytestmark = pytest.mark.nightly

NAME = "fairlead_transfer.adapters.nemo_rl:FairleadCheckpointEngine"


def test_stand_in(nemo_base):
    """The stand-in of the other tests has the abstract methods and arguments of NeMo RL's class."""
    kept = dict(sys.modules)
    stand_in, real = put_stand_in(), nemo_base.CheckpointEngine
    sys.modules.update({name: module for name, module in kept.items() if name.startswith("nemo_rl")})
    assert stand_in.__abstractmethods__ == real.__abstractmethods__
    for name in real.__abstractmethods__:
        ours, theirs = (inspect.signature(getattr(one, name)) for one in (stand_in, real))
        assert list(ours.parameters) == list(theirs.parameters), name


def test_deliver(nemo_base):
    """Engines that NeMo RL has made bring every tensor to every generation worker."""
    sys.modules.pop(NAME.partition(":")[0], None)
    options = {"bucket_size_bytes": 64 << 10, "engine_kwargs": {"release_after_refit": False}}
    engines = [nemo_base.create_checkpoint_engine(NAME, **options) for _ in range(4)]
    assert all(isinstance(one, nemo_base.CheckpointEngine) for one in engines)
    sizes = {"train_world_size": 2, "rollout_world_size": 2, "metadata": [one.prepare() for one in engines]}
    weights = make_weights(3, scale=5003)

    async def receive(engine):
        return [(name, digest(one)) async for batch in engine.receive_weight_batches() for name, one in batch]

    for rank in range(2):
        engines[rank].init_policy_process_group(worker_rank=rank, **sizes)
        engines[2 + rank].init_rollout_process_group(rollout_rank=rank, **sizes)
    with ThreadPoolExecutor(4) as threads:
        sent = [threads.submit(asyncio.run, one.send_weights(iter(weights))) for one in engines[:2]]
        received = [threads.submit(asyncio.run, receive(one)) for one in engines[2:]]
        for one in received:
            assert one.result(60) == [(name, digest(tensor)) for name, tensor in weights]
        for one in sent:
            one.result(60)
    for one in engines:
        one.finalize()
    assert find_left() == []
