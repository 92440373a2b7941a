# SPDX-License-Identifier: Apache-2.0
"""Samples of a node's memory, as its agent takes them."""

import sys
import threading
import types

import pytest

from fairlead_placement._nodes.agent_process import NodeAgent
from fairlead_placement._nodes.usage import take_sample


class Nvml(types.ModuleType):
    """Two GPUs of 100 bytes."""

    class NVMLError(Exception):
        pass

    def __init__(self):
        super().__init__("pynvml")
        self.used = [0, 30]
        self.is_broken = False
        self.returns, self.is_late = threading.Event(), threading.Event()
        self.returns.set()

    def nvmlInit(self):
        if not self.returns.is_set():
            self.is_late.set()
            self.returns.wait(60)
        if self.is_broken:
            raise self.NVMLError("no driver")

    def nvmlDeviceGetCount(self):
        return len(self.used)

    def nvmlDeviceGetHandleByIndex(self, number):
        return number

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return types.SimpleNamespace(total=100, used=self.used[gpu])


@pytest.fixture
def nvml(monkeypatch):
    fake = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_peaks(nvml):
    """A sample has the memory of the node and of its GPUs, with the peaks of the samples before it (seam: pynvml)."""
    first = take_sample()
    assert (first[4], first[5]) == ([(100, 0, 0), (100, 30, 30)], 1)
    assert first[0] == first[1] + first[2]
    nvml.used = [5, 20]
    second = take_sample(first)
    assert (second[4], second[5]) == ([(100, 5, 5), (100, 20, 30)], 2)
    assert second[3] == max(first[1], second[1])
    nvml.is_broken = True
    assert (take_sample(second)[4], take_sample(second)[5]) == (None, 3)


def test_a_driver_that_does_not_return(nvml, eventually):
    """While the driver of a GPU does not return, an agent shows its last sample (seam: pynvml)."""
    agent = NodeAgent()
    agent.memory(["watcher"], 30.0)
    nvml.returns.clear()
    assert nvml.is_late.wait(60)
    try:
        before = agent.memory(["watcher"], 30.0)
        assert before == agent.memory(["watcher"], 30.0)
    finally:
        nvml.returns.set()
    assert eventually(lambda: agent.memory(["watcher"], 30.0)[5] > before[5])
    agent.release(["watcher"])
