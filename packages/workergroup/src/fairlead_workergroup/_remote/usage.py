# SPDX-License-Identifier: Apache-2.0
"""The resources that processes use, measured on their node."""

import os
import time
from collections.abc import Sequence
from typing import Any

from .process import ZOMBIE, Process, read_stat

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def measure(processes: Sequence[Process]) -> list[dict[str, Any] | None]:
    """Return what each process uses, with when that was measured and when it started; None if it has ended.

    The times are in seconds since the machine started.
    """
    on_gpus = _read_gpus()
    rows: list[dict[str, Any] | None] = []
    for pid, started in processes:
        stat = read_stat(pid)
        if not stat or stat[0] in ZOMBIE or int(stat[19]) != started:
            rows.append(None)
            continue
        rows.append(
            {
                "cpu_s": (int(stat[11]) + int(stat[12])) * TICK_S,
                "measured_s": time.clock_gettime(time.CLOCK_BOOTTIME),
                "started_s": started * TICK_S,
                "num_threads": int(stat[17]),
                "rss_bytes": int(stat[21]) * os.sysconf("SC_PAGE_SIZE"),
                "gpu_memory_bytes": None if on_gpus is None else on_gpus.get(pid, 0),
            }
        )
    return rows


def _read_gpus() -> dict[int, int] | None:
    """Return the bytes that each process holds on all GPUs together; None without nvidia-ml-py or a GPU."""
    try:
        import pynvml
    except ImportError:
        return None
    held: dict[int, int] = {}
    try:
        pynvml.nvmlInit()
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        for gpu in gpus:
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu):
                # None if the driver does not report it.
                held[process.pid] = held.get(process.pid, 0) + (process.usedGpuMemory or 0)
    except pynvml.NVMLError:  # there is no driver, or a GPU has failed
        return None
    return held if gpus else None
