# SPDX-License-Identifier: Apache-2.0
"""Measures processes and memory inside a node agent's process.

Shipped by value, as `agent_process`: this module imports no sibling. psutil is installed wherever Ray is, because Ray
brings its own and does not start without it.
"""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

# A healthy driver answers within milliseconds; the first time, without persistence mode, within a few seconds.
NVML_S = 5.0
# Total, used, peak of one GPU; total, used, available, peak of the node, its GPUs, samples so far. In bytes.
GpuRow = tuple[int, int, int]
Row = tuple[int, int, int, int, list[GpuRow] | None, int]


class Gpus:
    """Reads the node's GPUs through nvidia-ml-py. Without that, or without a GPU, all figures are None.

    A wedged driver blocks whoever calls it, in `nvmlInit` too. So NVML is loaded at the first request and called on a
    thread of its own. Figures that do not arrive in time are unknown (None), and later requests return None at once
    until the driver has answered the call that is under way.
    """

    def __init__(self, timeout_s: float = NVML_S) -> None:
        self._timeout_s = timeout_s
        self._nvml: Any = None
        self._absent = False
        # Held while a request waits for the driver. Requests take turns, and do not wait while a call is unanswered.
        self._lock = threading.Lock()
        self._call: threading.Thread | None = None

    def memory(self) -> list[tuple[int, int]] | None:
        """Return the (total, used) bytes of each GPU, by NVML's index."""
        found = self._of_each("nvmlDeviceGetMemoryInfo")
        return found and [(int(one.total), int(one.used)) for one in found]

    def by_process(self) -> dict[int, int] | None:
        """Return the bytes that each process holds on all GPUs together."""
        found = self._of_each("nvmlDeviceGetComputeRunningProcesses")
        if found is None:
            return None
        held: dict[int, int] = {}
        for process in (process for on_gpu in found for process in on_gpu):
            # None if the driver does not report it.
            held[process.pid] = held.get(process.pid, 0) + (process.usedGpuMemory or 0)
        return held

    def _of_each(self, function: str) -> list[Any] | None:
        """Return what an NVML function returns for each GPU; None if that is unknown."""
        answers: list[list[Any] | None] = []
        with self._lock:
            if self._absent or (self._call is not None and self._call.is_alive()):
                return None
            self._call = threading.Thread(
                target=lambda: answers.append(self._read(function)), name="fairlead-nvml", daemon=True
            )
            self._call.start()
            self._call.join(self._timeout_s)
        return answers[0] if answers else None

    def _read(self, function: str) -> list[Any] | None:
        if self._nvml is None:
            self._nvml = _load_nvml()
        nvml = self._nvml
        if nvml is None:
            self._absent = True
            return None
        try:
            gpus = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
            return [getattr(nvml, function)(gpu) for gpu in gpus] or None
        except nvml.NVMLError:
            return None  # a GPU that has fallen off the bus must not end the sampling of the rest


def _load_nvml() -> Any:
    """Return nvidia-ml-py's module, initialised; None without it or without a driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


class ProcessMeter:
    """Measures processes, and remembers their CPU time from one request to the next."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._lock = threading.Lock()
        # (pid, start) -> (CPU seconds, when); a pid that is used again is another process.
        self._last: dict[tuple[int, float], tuple[float, float]] = {}

    def read(self, pids: list[int]) -> list[tuple[int, float, int, int, int | None]]:
        """Return (pid, CPU percent, resident bytes, threads, GPU bytes or None) of each process that is alive."""
        import psutil

        on_gpus = self._gpus.by_process()
        rows = []
        with self._lock:
            for pid in pids:
                try:
                    process = psutil.Process(pid)
                    with process.oneshot():
                        if process.status() == psutil.STATUS_ZOMBIE:
                            continue
                        # The clock is read next to the CPU time: on a busy node this thread may stand still in between.
                        cpu, now = process.cpu_times(), time.time()
                        memory, threads = process.memory_info().rss, process.num_threads()
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
                key = (pid, process.create_time())
                seconds = cpu.user + cpu.system
                # At first, since the process started.
                before, since = self._last.get(key, (0.0, key[1]))
                self._last[key] = (seconds, now)
                percent = 100 * max(0.0, seconds - before) / max(now - since, 1e-3)
                rows.append((pid, percent, memory, threads, None if on_gpus is None else on_gpus.get(pid, 0)))
            self._last = {key: last for key, last in self._last.items() if psutil.pid_exists(key[0])}
        return rows


@dataclass
class _Watch:
    """The samples and peaks of one watcher."""

    samples: int = 0
    peak: int = 0
    gpu_peaks: dict[int, int] = field(default_factory=dict)


class MemoryMeter:
    """Samples the node's memory once a second, on a thread of its own, while there is a watcher."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._lock = threading.Lock()
        self._watches: dict[str, _Watch] = {}
        self._thread: threading.Thread | None = None

    def read(self, watcher: str | None) -> Row:
        """Take a sample. Sampling for the watcher, if there is one, goes on until `unwatch`."""
        with self._lock:
            if watcher is None:
                return self._sample(_Watch())
            watch = self._watches.setdefault(watcher, _Watch())
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fairlead-memory", daemon=True)
                self._thread.start()
            return self._sample(watch)

    def unwatch(self, watcher: str) -> None:
        """Take no more samples for a watcher; can be repeated."""
        with self._lock:
            self._watches.pop(watcher, None)

    def watchers(self) -> tuple[list[str], bool]:
        """Return the watchers, and whether the thread runs."""
        with self._lock:
            return list(self._watches), self._thread is not None

    def _run(self) -> None:
        try:
            while True:
                time.sleep(1.0)
                with self._lock:
                    if not self._watches:
                        self._thread = None
                        return
                    for watch in self._watches.values():
                        self._sample(watch)
        except BaseException:
            with self._lock:
                self._thread = None  # the next request starts another
            raise

    def _sample(self, watch: _Watch) -> Row:
        import psutil

        memory = psutil.virtual_memory()
        # psutil's `used` includes the kernel's caches in some versions and not in others.
        used = memory.total - memory.available
        gpus = self._gpus.memory()
        watch.samples += 1
        watch.peak = max(watch.peak, used)
        for index, (_, used_there) in enumerate(gpus or ()):
            watch.gpu_peaks[index] = max(watch.gpu_peaks.get(index, 0), used_there)
        on_gpus = None
        if gpus is not None:
            on_gpus = [(total, now, watch.gpu_peaks[index]) for index, (total, now) in enumerate(gpus)]
        return memory.total, used, memory.available, watch.peak, on_gpus, watch.samples
