# SPDX-License-Identifier: Apache-2.0
"""Measures processes and memory on nodes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from . import meters
from .agent import ANSWER_S, ask_agents, release
from .functions import run_on_nodes
from .head import alive_nodes, choose_alive, head_deadline

ray.cloudpickle.register_pickle_by_value(meters)
# The CPU seconds of processes and when they were read, by node, pid and start. The oldest go first.
_measured: dict[tuple[str, int, float], tuple[float, float]] = {}
MEASURED_KEPT = 10_000


@dataclass(frozen=True)
class ProcessUsage:
    """The use of resources by one process.

    Attributes:
        pid: its number on the node.
        cpu_percent: CPU time since this process last measured it, else since it started, in percent of one CPU.
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


def usage_on_nodes(
    pids: Mapping[str, Sequence[int]], *, timeout_s: float = 60.0
) -> dict[str, list[ProcessUsage] | Exception]:
    """Measure processes, given by node id, on several nodes at once, within `timeout_s` seconds for all of it.

    Returns:
        By node id, the usage in the order of the pids, without processes that have ended; or the exception with which
        the measurement failed.
    """
    requests = {node_id: ([*its],) for node_id, its in pids.items()}
    usage: dict[str, list[ProcessUsage] | Exception] = {}
    for node_id, answer in run_on_nodes(meters.measure, requests, timeout_s=timeout_s).items():
        if isinstance(answer, Exception):
            usage[node_id] = answer
        else:
            rows, on_gpus = answer
            usage[node_id] = [_read_process(node_id, row, on_gpus) for row in rows]
    return usage


def _read_process(node_id: str, row: Sequence[Any], on_gpus: Mapping[int, int] | None) -> ProcessUsage:
    pid, started, seconds, now, memory, threads = row
    # A pid that is used again belongs to a process that started at another time.
    process = node_id, pid, started
    before, since = _measured.pop(process, (0.0, started))
    _measured[process] = seconds, now
    while len(_measured) > MEASURED_KEPT:
        _measured.pop(next(iter(_measured)), None)
    percent = 100 * max(0.0, seconds - before) / max(now - since, 1e-3)
    return ProcessUsage(pid, percent, memory, threads, None if on_gpus is None else on_gpus.get(pid, 0))


def read_usage(node_ids: Sequence[str], watcher: str | None) -> tuple[NodeUsage, ...]:
    """Return the memory of each node that is alive, in the order given; a PlacementError if one does not answer.

    The agents take a sample for the watcher each second until `unwatch`; without a watcher this is the only one.
    """
    with head_deadline():
        alive = alive_nodes()
    asked = [node_id for node_id in node_ids if node_id in alive]
    if watcher is None:
        answers: dict[str, Any] = run_on_nodes(meters.take_sample, dict.fromkeys(asked, ()), timeout_s=ANSWER_S)
    else:
        answers = ask_agents("memory", dict.fromkeys(asked, (watcher,)), dict.fromkeys(asked, (watcher,)))
    failed = {node_id: answer for node_id, answer in answers.items() if isinstance(answer, Exception)}
    for node_id in choose_alive(failed) if failed else ():
        raise failed[node_id]
    return tuple(_read_node(node_id, row) for node_id, row in answers.items() if node_id not in failed)


def unwatch(node_ids: Iterable[str], watcher: str) -> None:
    """Have no more samples taken for a watcher on some nodes. Can be repeated. A silent agent is left alone."""
    release(dict.fromkeys(node_ids, (watcher,)), timeout_s=10.0)


def _read_node(node_id: str, row: Sequence[Any]) -> NodeUsage:
    total, used, available, peak, gpus, samples, sampled_at = row
    on_gpus = None if gpus is None else tuple(GpuMemory(*gpu) for gpu in gpus)
    return NodeUsage(node_id, total, used, available, peak, on_gpus, samples, sampled_at)
