# SPDX-License-Identifier: Apache-2.0
"""The report of the start of a group: its phases, and how it is shown."""

import pytest

from fairlead_workergroup._start import report
from fairlead_workergroup._start.report import DRIVER_PHASES, WORKER_PHASES, StartClock


@pytest.fixture
def clock(monkeypatch):
    """Return a clock of a start of five workers, on a time that the test moves."""
    now = [100.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    clock = StartClock()
    for name, seconds in {"reserve": 2.0, "describe": 0.5, "create": 1.0}.items():
        with clock.phase(name):
            now[0] += seconds
    for rank in range(5):
        took = {"import": 1.0, "constructor": 10.0 if rank == 3 else 2.0}
        clock.note(rank, create=0.1, process=rank / 10, **took)
    now[0] += 11.5
    return clock


def test_phases(clock):
    """A phase of the driver has its seconds; one of the workers also the median, the maximum and the slowest ranks."""
    found = clock.report("policy")
    assert [phase.name for phase in found.phases] == [*DRIVER_PHASES, *WORKER_PHASES]
    assert (found.workers, found.seconds) == (5, 15.0)
    assert (found["reserve"].seconds, found["reserve"].median_s, found["reserve"].slowest) == (2.0, None, ())
    assert (found["environment"].seconds, found["create"].seconds, found["create"].max_s) == (0.0, 1.0, 0.1)
    constructor = found["constructor"]
    assert (constructor.seconds, constructor.median_s, constructor.max_s) == (10.0, 2.0, 10.0)
    assert constructor.slowest == ((3, 10.0), (0, 2.0), (1, 2.0), (2, 2.0))
    with pytest.raises(KeyError, match="start"):
        found["start"]


def test_shown(clock):
    """Its text has a line for each phase; a phase of the workers also names the slowest of them."""
    first, *lines = str(clock.report("policy")).splitlines()
    assert first == "policy: 5 workers started in 15.00 s"
    assert [line.split(":")[0].strip() for line in lines] == [*DRIVER_PHASES, *WORKER_PHASES]
    assert lines[0] == "  reserve: 2.00 s"
    slowest = "rank 3: 10.00 s, rank 0: 2.00 s, rank 1: 2.00 s, rank 2: 2.00 s"
    assert lines[-1] == f"  constructor: 10.00 s, median 2.00 s, slowest {slowest}"


def test_a_repeated_start_counts_once(clock):
    """If a rank is started again, its latest times count, and the number of workers stays."""
    clock.note(3, create=0.1, process=0.1, **{"import": 1.0, "constructor": 2.0})
    assert clock.report("policy")["constructor"].max_s == 2.0
    assert clock.report("policy").workers == 5
