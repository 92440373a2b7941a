# SPDX-License-Identifier: Apache-2.0
"""The values of measurements on a node."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessUsage:
    """The use of resources by one process.

    Attributes:
        pid: its number on the node.
        cpu_percent: CPU time since the agent last measured it, else since it started, in percent of one CPU.
        rss_bytes: its resident memory.
        num_threads: its threads.
        gpu_memory_bytes: its memory on all GPUs of the node; None without nvidia-ml-py or a GPU.
    """

    pid: int
    cpu_percent: float
    rss_bytes: int
    num_threads: int
    gpu_memory_bytes: int | None


@dataclass(frozen=True)
class GpuMemory:
    """Memory of one GPU.

    Attributes:
        total_bytes: its size.
        used_bytes: how much of it is in use.
        peak_bytes: the largest use in any sample.
    """

    total_bytes: int
    used_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class NodeUsage:
    """Memory of one node, for all its processes together.

    Attributes:
        node_id: Ray's id of the node.
        memory_total_bytes: memory of the machine.
        memory_used_bytes: the memory that is not available.
        memory_available_bytes: the memory that processes can still get.
        memory_peak_bytes: the largest use in any sample.
        gpu_memory: one entry per GPU of the machine, in NVML's order; None without nvidia-ml-py or a GPU.
        samples: how many samples have been taken, including this one.
        sampled_at: when this sample was taken, in seconds since the epoch by the node's clock.
    """

    node_id: str
    memory_total_bytes: int
    memory_used_bytes: int
    memory_available_bytes: int
    memory_peak_bytes: int
    gpu_memory: tuple[GpuMemory, ...] | None
    samples: int
    sampled_at: float
