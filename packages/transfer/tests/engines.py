# SPDX-License-Identifier: Apache-2.0
"""Processes with a checkpoint engine of a framework, and what they send. No group of Fairlead takes part."""

import abc
import asyncio
import collections
import contextlib
import gc
import importlib
import os
import signal
import sys
import threading
import types
import zlib
from pathlib import Path


def make_weights(seed=0, count=40, scale=997):
    """Return named tensors of many dtypes and shapes: empty ones, a scalar, and some that are not contiguous."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    weights = [
        ("empty", torch.empty(0, 3)),
        ("scalar", torch.tensor(float(seed))),
        ("mask", torch.rand(33, generator=generator) > 0.5),
        ("turned", torch.rand(30, 20, generator=generator).t()),
        ("complex", torch.rand(7, 2, generator=generator).to(torch.complex64)),
        ("conjugate", torch.complex(*torch.rand(2, 9, generator=generator)).conj()),
    ]
    for at in range(count):
        tensor = torch.rand(scale * (at % 7) + 1, generator=generator)
        weights.append((f"layer{at}", tensor.to([torch.float32, torch.bfloat16, torch.float64][at % 3])))
    return [*weights, ("last", torch.empty(0))]


def digest(tensor):
    """Return dtype, shape and a digest of the bits of a tensor."""
    import torch

    content = tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy()
    return str(tensor.dtype), tuple(tensor.shape), zlib.crc32(content)


def read_memory(*names):
    """Return bytes of these kinds of memory of this process."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) << 10 for name in names)


@contextlib.contextmanager
def watch_memory(*names):
    """Yield a list whose only entry is the most by which this memory has grown."""
    began, grown, ended = read_memory(*names), [0], threading.Event()

    def watch():
        while not ended.wait(0.0005):
            grown[0] = max(grown[0], read_memory(*names) - began)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield grown
    finally:
        ended.set()
        thread.join()


def open_files():
    """Return the files that this process has open, but those that a thread closes meanwhile: descriptor to name."""
    files = {}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(FileNotFoundError):
            files[descriptor] = os.readlink(f"/proc/self/fd/{descriptor}")
    return files


def find_left():
    """Return what a transfer may have left in this process: shared memory, sockets that listen, ends."""
    gc.collect()
    files = open_files().values()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "fairlead-transfer" in line]
    ends = getattr(sys.modules.get("_fairlead_transfer"), "ends", {})
    return [*(file for file in files if "fairlead-transfer" in file), *mapped, *map(repr, ends)]


@contextlib.contextmanager
def leave_nothing():
    """Check that nothing more is left after the block than before it."""
    before = collections.Counter(find_left())
    yield
    left = collections.Counter(find_left()) - before
    assert not left, left


def put_stand_in():
    """Put a stand-in of NeMo RL's base class into this process, with the same abstract methods as NeMo RL's."""

    class CheckpointEngine(abc.ABC):
        cleanup_after_load = True

        @abc.abstractmethod
        def prepare(self): ...

        @abc.abstractmethod
        def init_policy_process_group(self, *, worker_rank, train_world_size, rollout_world_size, metadata): ...

        @abc.abstractmethod
        def init_rollout_process_group(self, *, rollout_rank, train_world_size, rollout_world_size, metadata): ...

        def finalize(self):  # noqa: B027
            pass

        @abc.abstractmethod
        async def send_weights(self, weights): ...

        @abc.abstractmethod
        def receive_weight_batches(self): ...

    names = ["nemo_rl", "nemo_rl.utils", "nemo_rl.utils.checkpoint_engines", "nemo_rl.utils.checkpoint_engines.base"]
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    sys.modules[names[-1]].CheckpointEngine = CheckpointEngine
    return CheckpointEngine


class Member:
    """A process of a framework; its methods run on one event loop, as those of verl's workers do."""

    def prepare(self, framework, bucket_size, timeout=30.0, is_first=False):
        """Make the engine with the arguments that the framework passes, and prepare it."""
        options = {"is_master": is_first} if framework == "verl" else {"release_after_refit": False}
        if framework == "nemo_rl" and framework not in sys.modules:
            put_stand_in()
        module = importlib.import_module(f"fairlead_transfer.adapters.{framework}")
        self.engine = module.FairleadCheckpointEngine(bucket_size=bucket_size, timeout=timeout, **options)
        if framework == "nemo_rl":
            assert isinstance(self.engine, sys.modules["nemo_rl.utils.checkpoint_engines.base"].CheckpointEngine)
        self.framework = framework
        return self.engine.prepare()

    def call(self, method, *args, **kwargs):
        """Call a method of the engine."""
        return getattr(self.engine, method)(*args, **kwargs)

    async def run(self, coroutine):
        """Run a coroutine as the framework does: NeMo RL makes an event loop for each transfer."""
        return await (coroutine if self.framework == "verl" else asyncio.to_thread(asyncio.run, coroutine))

    async def send(self, seed, **options):
        """Send weights; return how much memory that took."""
        weights = make_weights(seed, **options)
        version = (seed,) if self.framework == "verl" else ()
        with watch_memory("RssAnon", "RssShmem") as grown:
            await self.run(self.engine.send_weights(iter(weights), *version))
        return grown[0]

    async def receive(self, version, kill_at=None):
        """Receive weights; return how much memory that took, and the digests. `kill_at` is the tensor to die at."""
        found = {}

        async def receive():
            if self.framework == "verl":
                async for name, tensor in self.engine.receive_weights(version):
                    found[name] = digest(tensor)
                    if name == kill_at:
                        os.kill(os.getpid(), signal.SIGKILL)
            else:
                async for batch in self.engine.receive_weight_batches():
                    found.update((name, digest(tensor)) for name, tensor in batch)
                    del batch

        with watch_memory("RssAnon") as grown:
            await self.run(receive())
        return grown[0], found

    def find_left(self):
        """Return what is left of transfers."""
        return find_left()
