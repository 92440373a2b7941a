# SPDX-License-Identifier: Apache-2.0
"""What the tests share: two pretend slices for all of them, and a record of calls."""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fairlead_tpu_executor.testing import PretendSlices

# What a node may have left from another job.
STALE = {"MEGASCALE_SLICE_ID": "77", "MEGASCALE_COORDINATOR_ADDRESS": "stale", "TPU_ZONE": "zone-of-node"}


@pytest.fixture(scope="module")
def slices() -> Iterator[PretendSlices]:
    """slice-1 and slice-2, v4-16, whose worker 1 has started before worker 0. Tests leave these as they are."""
    with PretendSlices() as made:
        made.add_slice()
        made.add_slice(env=STALE)
        yield made


@pytest.fixture
def spare(slices: PretendSlices, no_leaks: None) -> Iterator[Callable[..., str]]:
    """Adds slices of another type, v5p-16, for a test to break; they are gone after it."""
    before = set(slices.names())

    def add(**options: object) -> str:
        return slices.add_slice(**{"kind": "v5p-16", **options})

    yield add
    for name in set(slices.names()) - before:
        slices.remove(name)


class Record:
    """Calls on hosts, written down where the test can read them. It travels to the hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, *what: object) -> int:
        """Note a call, on a host; how many calls of this host came before."""
        worker = f"{os.environ['TPU_SLICE_NAME']}.{os.environ['EXECUTOR_CALL_INDEX']}"
        before = len(list(self.folder.glob(f"{worker}-*")))
        text = " ".join(map(str, (os.getpid(), *what)))
        draft = self.folder / f"draft-{uuid.uuid4().hex}"
        draft.write_text(text)
        draft.rename(self.folder / f"{worker}-{before:03}-{uuid.uuid4().hex}")
        return before

    def meet(self, *what: object) -> int:
        """As `write`, and wait until the other host of the slice has noted as many calls."""
        before = self.write(*what)
        other = f"{os.environ['TPU_SLICE_NAME']}.{1 - int(os.environ['EXECUTOR_CALL_INDEX'])}"
        deadline = time.monotonic() + 60
        while len(self.of(other)) <= before and time.monotonic() < deadline:
            time.sleep(0.05)
        return before

    def of(self, worker: str) -> list[str]:
        """What was noted on a host, "slice-1.0", in order."""
        return [path.read_text() for path in sorted(self.folder.glob(f"{worker}-*"))]

    def counts(self) -> dict[str, int]:
        """How many calls each host had."""
        workers = [path.name.rsplit("-", 2)[0] for path in self.folder.iterdir() if "draft" not in path.name]
        return {worker: workers.count(worker) for worker in sorted(set(workers))}


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path)
