# SPDX-License-Identifier: Apache-2.0
"""Measure the checkpoint engines between two network namespaces against a plain socket. It needs root and iproute2.

python benchmarks/bench_transfer_hosts.py
"""

import asyncio
import importlib
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LENGTH = 512 << 20
TENSORS = 64
BUCKET = 32 << 20
REPEATS = 5


class Host:
    """One end of both ways, in a process on a host of its own."""

    def __init__(self, address: str) -> None:
        import ray

        ray.util.get_node_ip_address = lambda: address
        self.address = address
        self.loop = asyncio.new_event_loop()

    def prepare(self) -> Any:
        """Make an engine, and the weights."""
        import torch

        from fairlead_transfer.adapters.verl import FairleadCheckpointEngine

        self.engine = FairleadCheckpointEngine(BUCKET, timeout=120.0)
        self.weights = [(f"w{index}", torch.ones(LENGTH // TENSORS // 4)) for index in range(TENSORS)]
        return self.engine.prepare()

    def join(self, membership: Any) -> None:
        """Take a place in the transfer."""
        self.engine.init_process_group(membership)

    def send(self) -> float:
        """Send the weights by the engine; return the seconds."""
        began = time.monotonic()
        self.loop.run_until_complete(self.engine.send_weights(iter(self.weights)))
        return time.monotonic() - began

    def receive(self) -> int:
        """Receive the weights by the engine; return their bytes."""

        async def receive() -> int:
            return sum([tensor.nbytes async for _, tensor in self.engine.receive_weights()])

        return self.loop.run_until_complete(receive())

    def listen(self) -> Any:
        """Listen for the plain socket, and fill the memory that it sends."""
        self.file = os.memfd_create("plain")
        os.write(self.file, bytes(LENGTH))
        self.listener = socket.create_server((self.address, 0))
        return self.listener.getsockname()

    def send_plain(self) -> float:
        """Send the same bytes with sendfile; return the seconds."""
        connection, _ = self.listener.accept()
        began, position = time.monotonic(), 0
        while position < LENGTH:
            position += os.sendfile(connection.fileno(), self.file, position, LENGTH - position)
        connection.recv(1)
        connection.close()
        return time.monotonic() - began

    def receive_plain(self, address: Any) -> int:
        """Receive them with recv_into."""
        content, position = memoryview(bytearray(LENGTH)), 0
        with socket.create_connection(address) as connection:
            while position < LENGTH:
                position += connection.recv_into(content[position:])
            connection.sendall(b"x")
        return position


def serve(descriptor: int, address: str) -> None:
    """Run commands until the other end is closed."""
    connection, host = Connection(descriptor), Host(address)
    while True:
        method, args = connection.recv()
        connection.send(getattr(host, method)(*args))


def measure() -> None:
    """Print the rates of both ways, run in turns, and the median of their ratios."""
    sys.path.insert(0, str(ROOT / "integration-tests"))
    network_type = importlib.import_module("multihost.network").Network
    from fairlead_transfer.adapters.verl import FairleadCheckpointEngine

    with network_type() as network:
        ends = []
        for _ in range(2):
            space, address = network.add()
            ours, theirs = multiprocessing.Pipe()
            isolated = ["ip", "netns", "exec", space, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
            command = [*isolated, sys.executable, __file__, str(theirs.fileno()), address]
            # One thread for torch, as in Ray's workers with one CPU.
            subprocess.Popen(command, pass_fds=[theirs.fileno()], env={**os.environ, "OMP_NUM_THREADS": "1"})
            ends.append(ours)

        def run(*calls: tuple[Any, ...]) -> list[Any]:
            for end, (method, *args) in zip(ends, calls, strict=True):
                end.send((method, args))
            return [end.recv() for end in ends]

        metadata = run(("prepare",), ("prepare",))
        sender, receiver = FairleadCheckpointEngine.build_topology(1, 1, metadata)
        run(("join", sender["membership"][0]), ("join", receiver["membership"][0]))
        ends[0].send(("listen", ()))
        address = ends[0].recv()
        ratios = []
        for turn in range(REPEATS + 1):
            engine_s = run(("send",), ("receive",))[0]
            plain_s = run(("send_plain",), ("receive_plain", address))[0]
            if turn:  # the first one connects and maps memory
                ratios.append(plain_s / engine_s)
                print(f"engine {LENGTH / engine_s / 1e9:.2f} GB/s, plain {LENGTH / plain_s / 1e9:.2f} GB/s")
        print(f"median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(int(sys.argv[1]), sys.argv[2])
    else:
        measure()
