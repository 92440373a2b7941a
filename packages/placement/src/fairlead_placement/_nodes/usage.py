# SPDX-License-Identifier: Apache-2.0
"""What was measured on a node, as values."""

from dataclasses import dataclass

__all__ = ["GpuMemory", "NodeUsage", "ProcessUsage"]


@dataclass(frozen=True)
class ProcessUsage:
    """What one process uses.

    Attributes:
        pid: its number on the node.
        cpu_percent: CPU time since it was last asked for by this job, or since it started, in percent of one CPU.
        rss_bytes: memory it has resident.
        num_threads: its threads.
        gpu_memory_bytes: what it holds on all GPUs of the node; None without nvidia-ml-py or a GPU there.
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
        total_bytes: what it has.
        used_bytes: what is in use.
        peak_bytes: the most that was in use in any sample.
    """

    total_bytes: int
    used_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class NodeUsage:
    """Memory of one node, all processes on it together.

    Attributes:
        node_id: Ray's id of the node.
        memory_total_bytes: memory of the machine.
        memory_used_bytes: what is not available.
        memory_available_bytes: what processes can still have.
        memory_peak_bytes: the most that was used in any sample.
        gpu_memory: one entry per GPU of the machine, in NVML's order; None without nvidia-ml-py or a GPU there.
        samples: how many have been taken, this one included.
        sampled_at: when this one was taken, in seconds since the epoch by the node's clock.
    """

    node_id: str
    memory_total_bytes: int
    memory_used_bytes: int
    memory_available_bytes: int
    memory_peak_bytes: int
    gpu_memory: tuple[GpuMemory, ...] | None
    samples: int
    sampled_at: float
