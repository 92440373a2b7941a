# SPDX-License-Identifier: Apache-2.0
"""The settings of all test suites, and what shows their progress; the folder `fixtures` has what they share."""

import gc
import importlib.util
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

pytest_plugins = ["fixtures.ray", "fixtures.order", "fixtures.interrupts", "fixtures.programs", "fixtures.waiting"]

# A shell starts background jobs with SIGINT ignored, and their children inherit that. Some tests send SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Ray records in this folder which cluster it started last, so test processes that run side by side have a folder each.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["RAY_TMPDIR"] = os.path.join(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()), worker)

# Not every package is tested with hypothesis.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    # No deadline: on a busy machine it would fail tests for being slow. No database: a test run leaves no files.
    examples = int(os.environ.get("FAIRLEAD_EXAMPLES", "150"))
    settings.register_profile("fairlead", max_examples=examples, deadline=None, database=None)
    settings.load_profile("fairlead")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude what the collection creates from garbage collection, which otherwise takes a quarter of the pure tests.

    The modules of torch and Ray and the tests themselves live to the end of the run: there is nothing to collect.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


# After so many seconds without output, a line says which test is running.
SILENCE_S = 15.0


class Progress:
    """Prints which test is running when nothing else has been printed for a while, so that no wait is silent."""

    def __init__(self) -> None:
        self._test, self._number, self._count = "collecting the tests", 0, 0
        self._began = self._shown = time.monotonic()
        self._finished = threading.Event()
        # pytest captures file descriptor 1 while a test runs.
        self._output = os.dup(1)

    def pytest_sessionstart(self) -> None:
        threading.Thread(target=self._report, daemon=True).start()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._count = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._count = len(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._test, self._number = nodeid, self._number + 1
        self._began = self._shown = time.monotonic()

    def pytest_sessionfinish(self) -> None:
        self._finished.set()

    def _report(self) -> None:
        while not self._finished.wait(1.0):
            now = time.monotonic()
            if now - self._shown >= SILENCE_S:
                self._shown = now
                line = f"\n{self._test}: {now - self._began:.0f} s [{self._number}/{self._count}]\n"
                os.write(self._output, line.encode())


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that records how long each file takes."""
    parser.addoption("--record-seconds", type=Path, help="write the seconds of each test file to this JSON file")


class Recorder:
    """Adds up the seconds that the tests of each file take, with their fixtures, and writes them to a JSON file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._seconds[file] = self._seconds.get(file, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        known = json.loads(self._path.read_text()) if self._path.exists() else {}
        known |= {file: round(seconds, 1) for file, seconds in self._seconds.items() if seconds >= 0.05}
        self._path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Show progress during long tests, and record seconds, in the process that starts the others."""
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(Progress())
    if path := config.getoption("--record-seconds"):
        config.pluginmanager.register(Recorder(path))
