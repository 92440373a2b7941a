# SPDX-License-Identifier: Apache-2.0
"""Progress bars."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from fairlead_venvs._progress import Bars


def test_bars_from_many_threads(monkeypatch):
    """Several builds report at once, and one display has a bar for each."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("fairlead_venvs._progress.QUIET_S", 0.0)
    names = [f"venv-{number}" for number in range(8)]
    together = threading.Barrier(len(names))

    def report(bars, name):
        together.wait(60)
        bars.update(name, 0, 1, "Resolved")
        bars.update(name, 0, 1, "Installed")

    often = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(40):
            with Bars() as bars, ThreadPoolExecutor(len(names)) as pool:
                for future in [pool.submit(report, bars, name) for name in names]:
                    future.result()
                assert sorted(task.description for task in bars._progress.tasks) == names
    finally:
        sys.setswitchinterval(often)
