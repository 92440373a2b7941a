# SPDX-License-Identifier: Apache-2.0
"""Workers whose tensors are transferred."""

import asyncio
import contextlib
import os
import time

import numpy as np

from fairlead_sharding import NamedSharding
from fairlead_transfer import Layout, LocalTensor
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, Restart, current_worker

SHAPE = 12, 8


class Holder:
    """A worker that holds its box of "w", and the whole of "norm" and of a scalar."""

    def __init__(self, dims, scale=0.0, dtype="float32"):
        me = current_worker()
        layout = Layout.from_sharding(SHAPE, me.sharding, dims)
        self.box = tuple(
            slice(at, at + size) for at, size in zip(layout.offsets[me.rank], layout.sizes[me.rank], strict=True)
        )
        self.offsets = layout.offsets[me.rank].tolist()
        self.calls = []
        self.w = np.zeros([0 if part.stop is None else part.stop - part.start for part in self.box], dtype)
        self.norm, self.step = np.zeros(5, dtype), np.zeros((), dtype)
        self.fill(scale)

    def fill(self, scale):
        self.w[...] = scale * full()[self.box]
        self.norm[...] = scale * np.arange(5)
        self.step[...] = scale

    def weights(self):
        self.calls.append("weights")
        return {"w": LocalTensor(self.w, SHAPE, self.offsets), "norm": self.norm, "step": self.step}

    def fail(self):
        raise ArithmeticError("broken")

    def wrong(self):
        return [1, 2]

    def odd(self):
        """Return tensors that fit those of `weights` in no way."""
        if not hasattr(self, "unfit"):
            self.unfit = {"w": np.zeros((3, 3)), "norm": self.norm.astype("int64"), "more": self.norm}
        return self.unfit

    def with_table(self):
        """Return the tensors of `weights`, and one that cannot be written."""
        return {**self.weights(), "table": np.broadcast_to(np.zeros(1), (4,))}

    def note(self):
        self.calls.append("note")

    def events(self):
        calls, self.calls = self.calls, []
        return calls

    def load(self, tensors):
        """Take whole tensors, as an inference engine does."""
        self.calls.append(sorted(tensors))
        for name, value in tensors.items():
            if name == "w":
                self.w[...] = value[self.box]
            else:
                getattr(self, name)[...] = value

    def load_one(self, tensors):
        self.load(tensors)
        if len(self.calls) == 2:
            raise ArithmeticError("broken")

    def holds(self):
        """Return the scale that all tensors have; None for a mixture."""
        scale = float(self.step)
        right = np.array_equal(self.w, (scale * full()[self.box]).astype(self.w.dtype))
        return scale if right and np.array_equal(self.norm, scale * np.arange(5)) else None


def full():
    return np.arange(np.prod(SHAPE), dtype="float32").reshape(SHAPE) + 1


class AsyncHolder(Holder):
    """The same, with methods that overlap."""

    async def generate(self, seconds):
        """Return what it holds before and after a wait."""
        before = self.holds()
        await asyncio.sleep(seconds)
        return before, self.holds()

    async def stream(self, count):
        """Yield what it holds, several times."""
        for _ in range(count):
            await asyncio.sleep(0)
            yield self.holds()

    async def generate_until(self, path):
        """Run until a file exists."""
        while not path.exists():
            await asyncio.sleep(0.01)

    async def fill_in_two_steps(self, scale, path):
        """Change one tensor, and the others when a file exists."""
        self.w[...] = scale * full()[self.box]
        await self.generate_until(path)
        self.fill(scale)

    def set_gate(self, path):
        self.gate = path

    def end_requests(self):
        """Let `generate_until` return."""
        self.gate.touch()

    async def weights(self):
        await asyncio.sleep(0)
        return super().weights()


class Gated(Holder):
    """The same; constructor, `rejoin` and `weights` wait while a file of this name exists in a folder."""

    def __init__(self, folder, dims, scale=0.0):
        self.folder = folder
        self.wait("constructor")
        super().__init__(dims, scale)

    def wait(self, name):
        while os.path.exists(os.path.join(self.folder, name)):
            time.sleep(0.01)

    def rejoin(self):
        self.wait("rejoin")

    def weights(self):
        self.wait("weights")
        return super().weights()


@contextlib.contextmanager
def two_groups(slots, worker):
    """Yield a source of two ranks without replicas of "w", and a target of two replicas.

    Args:
        slots: at least four.
        worker: a class like `Holder`.
    """
    with (
        RayWorkerGroup(
            slots[:2],
            RayWorkerBuilder(worker, {0: "tp"}, 1.0),
            sharding_annotations=NamedSharding.from_shape(tp=2),
            restart=Restart(max_restarts=1000),
        ) as source,
        RayWorkerGroup(
            slots[2:4],
            RayWorkerBuilder(worker, {}),
            sharding_annotations=NamedSharding.from_shape(replica=2),
            restart=Restart(max_restarts=1000),
        ) as target,
    ):
        yield source, target
