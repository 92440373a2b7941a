# SPDX-License-Identifier: Apache-2.0
"""The test's side of checkpoint engines on several hosts: processes in namespaces, and how a framework drives them."""

import multiprocessing
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .network import Network

_MAIN = Path(__file__).with_name("engine_main.py")
_START_S = 60.0


class Process:
    """A process with an engine, in the namespaces of its host."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def begin(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Begin a command."""
        self._connection.send((method, args, kwargs))

    def end(self, timeout_s: float) -> Any:
        """Return the result of the command, or its exception."""
        if not self._connection.poll(timeout_s):
            return TimeoutError(f"no reply within {timeout_s:g} s")
        return self._connection.recv()

    def run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a command, and return its result or raise its exception."""
        self.begin(method, *args, **kwargs)
        value = self.end(_START_S)
        if isinstance(value, BaseException):
            raise value
        return value

    def close(self) -> None:
        """Let the process end."""
        self._connection.close()


class EngineHosts:
    """Hosts with processes that have engines, each with a network and a process namespace of its own.

    Args:
        network: of the hosts.
        counts: the processes on each host.
        containers: whether all are on one host, each with a process namespace of its own.
    """

    def __init__(self, network: Network, counts: Sequence[int], *, containers: bool = False) -> None:
        self.network = network
        self.spaces: list[str] = []
        self.addresses: list[str] = []
        self._launchers: list[subprocess.Popen[bytes]] = []
        self.processes: list[list[Process]] = []
        space, address = network.add()
        for index, count in enumerate(counts):
            if index and not containers:
                space, address = network.add()
            self.spaces.append(space)
            self.addresses.append(address)
            pairs = [multiprocessing.Pipe() for _ in range(count)]
            theirs = [theirs.fileno() for _, theirs in pairs]
            isolated = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
            command = ["ip", "netns", "exec", space, *isolated, sys.executable, str(_MAIN), address, *map(str, theirs)]
            self._launchers.append(subprocess.Popen(command, pass_fds=theirs, stdin=subprocess.DEVNULL))
            for _, other in pairs:
                other.close()
            self.processes.append([Process(ours) for ours, _ in pairs])

    def count_entered(self, host: int) -> int:
        """Return the bytes that have entered a host over its network."""
        command = ["ip", "netns", "exec", self.spaces[host], "cat", "/proc/net/dev"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
        return int(next(line for line in lines if "eth0" in line).split(":")[1].split()[0])

    def close(self) -> None:
        """End all processes, including those that are stopped."""
        for process in (process for host in self.processes for process in host):
            process.close()
        for launcher in self._launchers:
            launcher.send_signal(signal.SIGKILL)
            launcher.wait(30)


def connect(framework: str, senders: list[Process], receivers: list[Process], **options: Any) -> None:
    """Do what a framework does before a transfer."""
    everyone = [*senders, *receivers]
    for process in everyone:
        process.begin("prepare", framework, options)
    metadata = [process.end(_START_S) for process in everyone]
    assert all(isinstance(member, dict) for member in metadata), metadata
    if framework == "verl":
        from fairlead_transfer.adapters.verl import FairleadCheckpointEngine

        sides = FairleadCheckpointEngine.build_topology(len(senders), len(receivers), metadata)
        places = [place for side in sides for place in side["membership"]]
        for process, place in zip(everyone, places, strict=True):
            process.run("call", "init_process_group", place)
        return
    sizes = {"train_world_size": len(senders), "rollout_world_size": len(receivers), "metadata": metadata}
    for rank, process in enumerate(senders):
        process.run("call", "init_policy_process_group", worker_rank=rank, **sizes)
    for rank, process in enumerate(receivers):
        process.run("call", "init_rollout_process_group", rollout_rank=rank, **sizes)


def transfer(
    senders: list[Process],
    receivers: list[Process],
    seed: int,
    sizes: Sequence[int],
    timeout_s: float,
    fault: tuple[Process, int, int] | None = None,
) -> tuple[list[Any], float]:
    """Run a transfer; return the results or exceptions of all but the one with the fault, and the seconds that it took.

    A fault is a process, the index of the tensor at which it gets a signal, and the signal.
    """
    began = time.monotonic()
    for process in [*senders, *receivers]:
        mine = None if fault is None or fault[0] is not process else fault[1:]
        if process in senders:
            process.begin("send", seed, sizes, mine)
        else:
            process.begin("receive", mine)
    results = []
    for process in [*senders, *receivers]:
        if fault is None or fault[0] is not process:  # otherwise nothing comes
            results.append(process.end(max(0.1, began + timeout_s - time.monotonic())))
    return results, time.monotonic() - began
