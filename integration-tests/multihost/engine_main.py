# SPDX-License-Identifier: Apache-2.0
"""A host with checkpoint engines of fairlead_transfer: one process for each connection, which a test commands.

It runs in a network and a process namespace of its own. No Ray takes part: the frameworks carry the metadata.
"""

import asyncio
import contextlib
import hashlib
import importlib
import os
import signal
import sys
import types
from multiprocessing.connection import Connection

import ray
import torch


class Engine:
    """Runs the commands of a test on one engine."""

    def __init__(self, address):
        # What Ray says on a worker of this host.
        ray.util.get_node_ip_address = lambda: address
        self.loop = asyncio.new_event_loop()

    def prepare(self, framework, options):
        """Make the engine and prepare it."""
        if framework == "nemo_rl":
            put_base_class()
        else:
            sys.meta_path.insert(0, WithoutVerl())  # the engine needs nothing of it in this process
        module = importlib.import_module(f"fairlead_transfer.adapters.{framework}")
        self.framework = framework
        self.engine = module.FairleadCheckpointEngine(**options)
        return self.engine.prepare()

    def call(self, method, *args, **kwargs):
        """Call a method of the engine."""
        return getattr(self.engine, method)(*args, **kwargs)

    def send(self, seed, sizes, fault=None):
        """Send the weights of a seed; with a fault, (index, signal), this process gets the signal at that tensor."""

        def yield_weights():
            for index, (name, tensor) in enumerate(make_weights(seed, sizes)):
                commit_fault(fault, index)
                yield name, tensor

        self.loop.run_until_complete(self.engine.send_weights(yield_weights()))

    def receive(self, fault=None):
        """Return a digest of the weights."""

        async def receive():
            found, index = hashlib.sha256(), 0
            if self.framework == "verl":
                stream = self.engine.receive_weights()
            else:
                stream = flatten(self.engine.receive_weight_batches())
            async with contextlib.aclosing(stream):
                async for name, tensor in stream:
                    commit_fault(fault, index)
                    add_tensor(found, name, tensor)
                    index += 1
            return found.hexdigest()

        return self.loop.run_until_complete(receive())


class WithoutVerl:
    """Lets no module of verl be found."""

    def find_spec(self, name, path=None, target=None):
        if name == "verl":
            raise ModuleNotFoundError(name, name=name)


async def flatten(batches):
    """Yield the tensors of batches."""
    async for batch in batches:
        for named in batch:
            yield named


def put_base_class():
    """Put an empty base class of NeMo RL's engines into this process."""
    name = "nemo_rl.utils.checkpoint_engines.base"
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules[".".join(parts[:end])] = types.ModuleType(".".join(parts[:end]))
    sys.modules[name].CheckpointEngine = object


def commit_fault(fault, index):
    """Give this process the signal of a fault if it is planned for this tensor."""
    if fault is not None and fault[0] == index:
        os.kill(os.getpid(), fault[1])


def make_weights(seed, sizes):
    """Yield named tensors of these numbers of elements."""
    for index, size in enumerate(sizes):
        yield f"w{index}", torch.arange(size, dtype=torch.float32) * (index + 1) + seed


def add_tensor(found, name, tensor):
    """Add a tensor to a digest."""
    found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    found.update(memoryview(tensor.contiguous().view(torch.uint8).numpy()))


def digest_weights(seed, sizes):
    """Return the digest of the weights of a seed."""
    found = hashlib.sha256()
    for name, tensor in make_weights(seed, sizes):
        add_tensor(found, name, tensor)
    return found.hexdigest()


def serve(connection, address):
    """Run commands until the test closes the connection."""
    engine = Engine(address)
    with contextlib.suppress(EOFError):
        while True:
            method, args, kwargs = connection.recv()
            try:
                reply = getattr(engine, method)(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001  the test wants whatever it is
                reply = error
            connection.send(reply)


def main():
    torch.set_num_threads(1)
    address, *descriptors = sys.argv[1:]
    children = []
    connections = list(map(int, descriptors))
    for index, descriptor in enumerate(connections):
        child = os.fork()
        if not child:
            for other in connections[index + 1 :]:
                os.close(other)
            try:
                serve(Connection(descriptor), address)
            finally:
                os._exit(0)
        os.close(descriptor)
        children.append(child)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
