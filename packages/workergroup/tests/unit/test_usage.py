# SPDX-License-Identifier: Apache-2.0
"""The use of resources by processes of one machine."""

import os
import subprocess
import sys
import types

import pytest

from fairlead_workergroup._remote.node import measure
from fairlead_workergroup._remote.process import start_tick


class Nvml(types.ModuleType):
    """Two GPUs, of which this process and its parent use one together."""

    class NVMLError(Exception):
        pass

    def __init__(self, error=None):
        super().__init__("pynvml")
        self.error = error

    def nvmlInit(self):
        if self.error:
            raise self.NVMLError(self.error)

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, number):
        return number

    def nvmlDeviceGetComputeRunningProcesses(self, gpu):
        rows = [(os.getpid(), 10), (os.getppid(), None)] if gpu else [(os.getpid(), 7)]
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in rows]


@pytest.fixture
def child():
    process = subprocess.Popen(["sleep", "281"])
    yield process
    process.kill()
    process.communicate()


def test_ended_processes(child):
    """A process that has ended, a zombie, and another process with its pid have no usage."""
    process = child.pid, start_tick(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert measure([process, (os.getpid(), 1), (2**22 + 1, 5)]) == [None] * 3


@pytest.mark.parametrize(("nvml", "expected"), [(Nvml(), 17), (Nvml("no driver"), None), (None, None)])
def test_gpu_memory(nvml, expected, monkeypatch):
    """The memory of a process on all GPUs is added up; without nvidia-ml-py or a driver it is None (seam: pynvml)."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    (row,) = measure([(os.getpid(), start_tick(os.getpid()))])
    assert row["gpu_memory_bytes"] == expected
