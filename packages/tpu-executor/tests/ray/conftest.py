# SPDX-License-Identifier: Apache-2.0
"""The fixtures of the tests with Ray: two pretend slices for all of them, and a record of calls."""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from fairlead_tpu_executor.testing import PretendSlices

# Variables that another job may have left on a node.
STALE = {"MEGASCALE_SLICE_ID": "77", "MEGASCALE_COORDINATOR_ADDRESS": "stale", "TPU_ZONE": "zone-of-node"}


@pytest.fixture(scope="session", autouse=True)
def own_coordinator_port(coordinator_port: str) -> None:
    """Give this test run its own port for the coordinator of several slices; the default is fixed."""


@pytest.fixture(scope="module")
def slices() -> Iterator[PretendSlices]:
    """Start slice-1 and slice-2, v4-16, worker 1 before worker 0. Tests do not change them."""
    with PretendSlices() as made:
        made.add_slice()
        made.add_slice(env=STALE)
        yield made


@pytest.fixture
def spare(slices: PretendSlices, no_leaks: None) -> Iterator[Callable[..., str]]:
    """Return a function that adds slices of another type, v5p-16, for a test to break; they are removed after it."""
    before = set(slices.names())

    def add(**options: object) -> str:
        return slices.add_slice(**{"kind": "v5p-16", **options})

    yield add
    for name in set(slices.names()) - before:
        slices.remove(name)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list of the pauses of the pools that wait for slices, in seconds: it is empty until one waits."""
    made: list[float] = []

    def sleep(seconds: float) -> None:
        made.append(seconds)
        time.sleep(seconds)

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr("fairlead_tpu_executor._reservation.time", clock)
    return made


@pytest.fixture(autouse=True)
def processes_end_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a cancelled process take a minute to end, on a busy machine."""
    monkeypatch.setattr("fairlead_tpu_executor._attempt.CANCEL_S", 60.0)


class Record:
    """A record of the calls on hosts, in files that the test can read. It is sent to the hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, *what: object) -> int:
        """Record a call on a host, and return how many earlier calls the host has recorded."""
        worker = f"{os.environ['TPU_SLICE_NAME']}.{os.environ['EXECUTOR_CALL_INDEX']}"
        before = len(list(self.folder.glob(f"{worker}-*")))
        text = " ".join(map(str, (os.getpid(), *what)))
        draft = self.folder / f"draft-{uuid.uuid4().hex}"
        draft.write_text(text)
        draft.rename(self.folder / f"{worker}-{before:03}-{uuid.uuid4().hex}")
        return before

    def meet(self, *what: object) -> int:
        """Record a call like `write`, and wait until the other host of the slice has recorded as many."""
        before = self.write(*what)
        other = f"{os.environ['TPU_SLICE_NAME']}.{1 - int(os.environ['EXECUTOR_CALL_INDEX'])}"
        deadline = time.monotonic() + 150
        while len(self.of(other)) <= before and time.monotonic() < deadline:
            time.sleep(0.05)
        return before

    def of(self, worker: str) -> list[str]:
        """Return the records of a host, such as "slice-1.0", in order."""
        return [path.read_text() for path in sorted(self.folder.glob(f"{worker}-*"))]

    def counts(self) -> dict[str, int]:
        """Return the number of calls of each host."""
        workers = [path.name.rsplit("-", 2)[0] for path in self.folder.iterdir() if "draft" not in path.name]
        return {worker: workers.count(worker) for worker in sorted(set(workers))}


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path)
