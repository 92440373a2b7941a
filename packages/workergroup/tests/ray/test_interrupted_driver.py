# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at random moments of a group's life leaves nothing of the group behind, and ends it in time."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import ray

pytestmark = pytest.mark.nightly

# Each phase once. `nox -s nightly` interrupts more often, on a machine that does nothing else.
MOMENTS = int(os.environ.get("FAIRLEAD_INTERRUPTS", "7"))
WITHIN_S = 10.0 if "FAIRLEAD_INTERRUPTS" in os.environ else 30.0
SEED = int(os.environ.get("FAIRLEAD_SOAK_SEED", "0"))
DRIVER = Path(__file__).parents[1] / "interrupted.py"
PHASES = ("start", "call", "grow", "move", "restart", "shrink", "shutdown")


class Driver:
    """A process that uses groups in phases, and how long each phase takes."""

    def __init__(self, address: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, DRIVER, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.takes_s: dict[str, float] = {}

    def __enter__(self) -> "Driver":
        entered = [(self._read(), time.monotonic())]
        while entered[-1][0] != "ready":
            entered.append((self._read(), time.monotonic()))
        for (phase, began), (_, ended) in pairwise(entered):
            self.takes_s[phase] = ended - began
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the driver has ended with {self._process.wait(60)}"
        return line.strip()

    def interrupt(self, phase: str, pauses: list[float]) -> tuple[float, dict[str, object]]:
        """Interrupt the driver after each of some pauses in a phase; return when nothing was left, and its report."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{phase}\n")
        self._process.stdin.flush()
        while self._read() != phase:
            pass
        began = 0.0
        for pause_s in pauses:
            time.sleep(pause_s)
            self._process.send_signal(signal.SIGINT)
            began = began or time.monotonic()
        while not (line := self._read()).startswith("{"):
            pass
        return time.monotonic() - began, json.loads(line)


@pytest.mark.usefixtures("local_ray")
@pytest.mark.timeout(120 + 30 * MOMENTS)
def test_interrupted_driver():
    """Ctrl-C at any moment of a start, a call, a change or a shutdown ends the group in time, as does a second one."""
    chance, took = random.Random(SEED), {}
    with Driver(ray.get_runtime_context().gcs_address) as driver:
        for number in range(MOMENTS):
            phase = PHASES[number % len(PHASES)]
            pauses = [chance.uniform(0, driver.takes_s[phase])]
            if number % 3 == 2:
                pauses.append(chance.uniform(0, 1))
            took[number], report = driver.interrupt(phase, pauses)
            what = f"moment {number}, {phase}, after {pauses}: {took[number]:.1f} s, {report}"
            assert not report["left"], what
            assert not report["error"], what
            assert took[number] < WITHIN_S, what
    if "FAIRLEAD_INTERRUPTS" in os.environ:
        sys.stdout.write(f"{MOMENTS} moments; the slowest end took {max(took.values()):.1f} s\n")
