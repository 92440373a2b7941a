# SPDX-License-Identifier: Apache-2.0
"""GPU memory, as a node agent reads it from NVML."""

import os
import sys
import threading
import types

import pytest

from fairlead_placement._nodes import meters
from fairlead_placement._nodes.agent_process import NodeAgent
from fairlead_placement._nodes.meters import Gpus, measure, take_sample


class FakeNvml(types.ModuleType):
    """Two GPUs, of which the second is used by two processes."""

    class NVMLError(Exception):
        pass

    def __init__(self):
        super().__init__("pynvml")
        self.used = [0, 30]
        self.broken = False
        self.inits = 0
        self.answers = threading.Event()
        self.answers.set()

    def nvmlInit(self):
        self.inits += 1
        self.answers.wait(60)
        if self.used is None:
            raise self.NVMLError("no driver")

    def nvmlDeviceGetCount(self):
        self.answers.wait(60)
        if self.broken:
            raise self.NVMLError("lost")
        return len(self.used)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return types.SimpleNamespace(total=100, used=self.used[gpu])

    def nvmlDeviceGetComputeRunningProcesses(self, gpu):
        rows = [(os.getpid(), 10), (os.getppid(), None)] if gpu else [(os.getpid(), 7)]
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in rows]


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delitem(sys.modules, "_fairlead_gpus", raising=False)  # what this process knows of its GPUs
    yield fake
    sys.modules.pop("_fairlead_gpus", None)


def test_gpu_memory(nvml):
    """With nvidia-ml-py, GPU memory is reported with peaks, and per process over all GPUs (seam: pynvml)."""
    agent = NodeAgent()
    assert agent.memory("watcher")[4] == [(100, 0, 0), (100, 30, 30)]
    nvml.used = [5, 20]
    assert agent.memory("watcher")[4] == [(100, 5, 5), (100, 20, 30)]
    assert take_sample()[4] == [(100, 5, 5), (100, 20, 20)]
    agent.release(["watcher"])
    assert measure([os.getpid()])[1] == {os.getpid(): 17, os.getppid(): 0}
    nvml.broken = True
    assert take_sample()[4] is None
    assert measure([os.getpid()])[1] is None


@pytest.mark.parametrize("used", [[], None], ids=["no GPU", "no driver"])
def test_no_gpu(nvml, used):
    """Without a GPU or its driver, GPU figures are None (seam: pynvml)."""
    nvml.used = used
    assert (Gpus().memory(), Gpus().by_process()) == (None, None)


@pytest.mark.parametrize("at_first", [True, False], ids=["at its initialisation", "later"])
def test_a_wedged_driver(nvml, at_first, eventually, monkeypatch):
    """While a driver does not return, GPU figures are None and no further request waits for it (seam)."""
    gpus = Gpus.shared()
    assert nvml.inits == 0
    if not at_first:
        assert gpus.by_process() is not None
    nvml.answers.clear()
    monkeypatch.setattr(meters, "NVML_S", 0.05)
    try:
        assert [gpus.memory() for _ in range(3)] == [None] * 3
        assert [thread.name for thread in threading.enumerate()].count("fairlead-nvml") == 1
        assert measure([os.getpid()])[1] is None
    finally:
        nvml.answers.set()
    assert eventually(lambda: gpus.memory() == [(100, 0), (100, 30)])
    assert nvml.inits == 1
