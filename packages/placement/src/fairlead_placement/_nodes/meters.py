# SPDX-License-Identifier: Apache-2.0
"""Measures processes and memory on a node.

Shipped by value: this module imports no sibling. psutil is installed wherever Ray is, because Ray
brings its own and does not start without it.
"""

import itertools
import sys
import threading
import time
import types
from typing import Any

# A healthy driver answers within milliseconds; the first time, without persistence mode, within a few seconds.
NVML_S = 5.0
# Total, used, peak of one GPU; total, used, available, peak of the node, its GPUs, samples so far. In bytes.
GpuRow = tuple[int, int, int]
Row = tuple[int, int, int, int, list[GpuRow] | None, int]


class Gpus:
    """Reads the node's GPUs through nvidia-ml-py; figures are None without it, or without a GPU.

    A wedged driver blocks whoever calls it. So it is called on a thread of its own, and figures are None while it does
    not answer.
    """

    @classmethod
    def shared(cls) -> "Gpus":
        """Return the one of this process, so that a wedged driver blocks one thread of it."""
        # Not in this module, whose copies by value must not have it.
        shared: Any = sys.modules.setdefault("_fairlead_gpus", types.ModuleType("_fairlead_gpus"))
        gpus: Gpus = shared.__dict__.setdefault("gpus", cls())
        return gpus

    def __init__(self) -> None:
        self._is_absent: bool | None = None  # None until the driver has been asked for the first time
        self._lock = threading.Lock()
        self._call: threading.Thread | None = None

    def memory(self) -> list[tuple[int, int]] | None:
        """Return the (total, used) bytes of each GPU, by NVML's index."""
        found = self._of_each("nvmlDeviceGetMemoryInfo")
        return found and [(int(memory.total), int(memory.used)) for memory in found]

    def by_process(self) -> dict[int, int] | None:
        """Return the bytes that each process holds on all GPUs together."""
        found = self._of_each("nvmlDeviceGetComputeRunningProcesses")
        held: dict[int, int] = {}
        for process in itertools.chain.from_iterable(found or ()):
            # None if the driver does not report it.
            held[process.pid] = held.get(process.pid, 0) + (process.usedGpuMemory or 0)
        return None if found is None else held

    def _of_each(self, function: str) -> list[Any] | None:
        answers: list[list[Any] | None] = []
        with self._lock:
            if self._is_absent or (self._call is not None and self._call.is_alive()):
                return None
            self._call = threading.Thread(
                target=lambda: answers.append(self._read(function)), name="fairlead-nvml", daemon=True
            )
            self._call.start()
            self._call.join(NVML_S)
        return answers[0] if answers else None

    def _read(self, function: str) -> list[Any] | None:
        try:
            import pynvml
        except ImportError:
            self._is_absent = True
            return None
        try:
            if self._is_absent is None:
                self._is_absent = True
                pynvml.nvmlInit()
                self._is_absent = False
            gpus = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
            return [getattr(pynvml, function)(gpu) for gpu in gpus] or None
        except pynvml.NVMLError:
            return None  # a GPU that has fallen off the bus must not end the sampling of the rest


def measure(pids: list[int]) -> tuple[list[tuple[int, float, float, float, int, int]], dict[int, int] | None]:
    """Measure the processes that are alive.

    Returns:
        (pid, when it started, its CPU seconds, when they were read, resident bytes, threads) of each process, and the
        bytes of GPU memory by pid, or None.
    """
    import psutil

    rows = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                # The clock is read next to the CPU time: on a busy node this thread may stand still in between.
                cpu, now = process.cpu_times(), time.time()
                memory, threads = process.memory_info().rss, process.num_threads()
                rows.append((pid, process.create_time(), cpu.user + cpu.system, now, memory, threads))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return rows, Gpus.shared().by_process()


def read_memory(gpus: Gpus) -> tuple[int, int, list[tuple[int, int]] | None]:
    """Return the total and the available bytes of the node's memory, and (total, used) of each GPU."""
    import psutil

    memory = psutil.virtual_memory()
    return memory.total, memory.available, gpus.memory()


def take_sample() -> tuple[Any, ...]:
    """Return a single sample of the node's memory, as a row of `Peaks`, and the time."""
    return (*Peaks().add(*read_memory(Gpus.shared())), time.time())


class Peaks:
    """Samples of the node's memory, and their peaks."""

    def __init__(self) -> None:
        self._samples = 0
        self._peak = 0
        self._on_gpus: dict[int, int] = {}

    def add(self, total: int, available: int, gpus: list[tuple[int, int]] | None) -> Row:
        """Add a sample, and return it with the peaks."""
        # psutil's `used` includes the kernel's caches in some versions and not in others.
        used = total - available
        self._samples += 1
        self._peak = max(self._peak, used)
        rows: list[GpuRow] = []
        for index, (size, now) in enumerate(gpus or ()):
            self._on_gpus[index] = max(self._on_gpus.get(index, 0), now)
            rows.append((size, now, self._on_gpus[index]))
        return total, used, available, self._peak, rows or None, self._samples
