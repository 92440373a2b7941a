# SPDX-License-Identifier: Apache-2.0
"""Workers whose tensors are on a GPU. This module asks for none when it is imported, because Ray hides it from them."""

import asyncio
import os

from fairlead_transfer import Layout, LocalTensor
from fairlead_workergroup import current_worker

SHAPE = 64, 16384


class Holder:
    """Holds its box of "w", and the whole of a strided tensor and of a scalar, on the GPU."""

    def __init__(self, dims, scale=0.0):
        # The slots hold no GPU, so Ray hides the GPU, which all workers of these tests share.
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        import torch

        torch.set_num_threads(1)
        me = current_worker()
        layout = Layout.from_sharding(SHAPE, me.sharding, dims)
        offsets, sizes = layout.offsets[me.rank].tolist(), layout.sizes[me.rank].tolist()
        self.offsets, self.box = offsets, tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        self.allocate()
        self.fill(scale)

    def allocate(self):
        import torch

        sizes = [part.stop - part.start for part in self.box]
        self.w = torch.zeros(sizes, dtype=torch.bfloat16, device="cuda")
        self.strided = torch.zeros((33, 2 * SHAPE[0]), device="cuda").t()[::2]
        self.step = torch.zeros((), dtype=torch.int64, device="cuda")

    def reallocate(self):
        """Give the memory back to the driver of the GPU, and take other memory."""
        import torch

        self.w = self.strided = self.step = None
        torch.cuda.empty_cache()
        self.allocate()

    def expected(self, scale):
        import torch

        w = (torch.arange(SHAPE[0] * SHAPE[1], device="cuda") % 251).reshape(SHAPE)[self.box]
        strided = torch.arange(33 * SHAPE[0], device="cuda").reshape(SHAPE[0], 33)
        return (w * scale).bfloat16(), (strided * scale).float(), int(scale)

    def fill(self, scale):
        w, strided, step = self.expected(scale)
        self.w.copy_(w)
        self.strided.copy_(strided)
        self.step.fill_(step)

    def weights(self):
        return {"w": LocalTensor(self.w, SHAPE, self.offsets), "strided": self.strided, "step": self.step}

    def holds(self):
        """Return the scale that all tensors have; None for a mixture."""
        import torch

        scale = float(self.step)
        w, strided, _ = self.expected(scale)
        return scale if torch.equal(self.w, w) and torch.equal(self.strided, strided) else None

    def note(self):
        """Do nothing."""

    def load(self, tensors):
        """Take whole tensors in host memory, as an inference engine does."""
        for name, value in tensors.items():
            getattr(self, name).copy_(value[self.box] if name == "w" else value)

    def memory(self):
        import torch

        return torch.cuda.memory_allocated()


class AsyncHolder(Holder):
    """The same, with methods that overlap."""

    async def generate(self, seconds):
        """Return what it holds before and after a wait."""
        before = self.holds()
        await asyncio.sleep(seconds)
        return before, self.holds()

    async def weights(self):
        return super().weights()
