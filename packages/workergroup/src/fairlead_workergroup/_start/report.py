# SPDX-License-Identifier: Apache-2.0
"""The state of a group as a value, and how long its start took: by phase, and for the slowest workers."""

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .._observe.display import record_html

PhaseName = Literal["reserve", "environment", "agents", "describe", "create", "process", "import", "constructor"]
DRIVER_PHASES: tuple[PhaseName, ...] = ("reserve", "environment", "agents", "describe")
# Each worker goes through these on its own.
WORKER_PHASES: tuple[PhaseName, ...] = ("create", "process", "import", "constructor")
# How many ranks a phase names.
SLOWEST = 4


@dataclass(frozen=True)
class StartPhase:
    """How long one phase of a start took.

    Attributes:
        name: "reserve": the cluster; "environment": the Python of the workers on their nodes; "agents": the node
            agents and the master port; "describe": the class; "create": Ray's head acknowledges each actor; "process":
            Ray starts the process and delivers the request; "import": the arguments and the class are loaded;
            "constructor": `__init__` runs.
        seconds: the duration. Of the phases "process", "import" and "constructor", which the workers go through at the
            same time, it is that of the slowest worker.
        median_s: the median over the workers; None for a phase of the driver.
        max_s: the maximum over the workers; None for a phase of the driver.
        slowest: the slowest workers as `(rank, seconds)`, the slowest first; empty for a phase of the driver.
    """

    name: PhaseName
    seconds: float
    median_s: float | None = None
    max_s: float | None = None
    slowest: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class StartReport:
    """How long the start of a group took; its text has a line for each phase.

    Attributes:
        group: the name of the group.
        workers: the number of its workers.
        seconds: from the call of the constructor of the group until every worker had started.
        phases: the phases in order.
    """

    group: str
    workers: int
    seconds: float
    phases: tuple[StartPhase, ...] = field(default=())

    def __getitem__(self, name: PhaseName) -> StartPhase:
        """Return a phase by its name.

        Raises:
            KeyError: there is no such phase.
        """
        for phase in self.phases:
            if phase.name == name:
                return phase
        raise KeyError(name)

    def __str__(self) -> str:
        lines = [f"{self.group}: {self.workers} workers started in {self.seconds:.2f} s"]
        for phase in self.phases:
            slowest = ", ".join(f"rank {rank}: {seconds:.2f} s" for rank, seconds in phase.slowest)
            of_workers = "" if phase.median_s is None else f", median {phase.median_s:.2f} s, slowest {slowest}"
            lines.append(f"  {phase.name}: {phase.seconds:.2f} s{of_workers}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class GroupState:
    """The state of a group at the time of `RayWorkerGroup.inspect`.

    Attributes:
        epoch: the number of changes of membership so far: restarts, resizes and replacements. Every call runs in one
            epoch: no worker sees it with the facts of another one.
        standby: the number of standbys that are ready.
        standby_metadata: a dict for each standby: its place, and whether it is "warm" or "starting".
        start_report: how long the start of the group took. Restarts do not change it.
        shown: what packages show of the group, by the key that each has chosen, such as the versions of a link.
    """

    epoch: int
    standby: int
    standby_metadata: list[dict[str, Any]]
    start_report: StartReport
    shown: Mapping[str, Any]

    _repr_html_ = record_html


class StartClock:
    """Measures the phases of a start. It begins when it is made."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._of_workers: dict[str, dict[int, float]] = {name: {} for name in WORKER_PHASES}

    @contextlib.contextmanager
    def phase(self, name: PhaseName) -> Iterator[None]:
        """Add the time of a block to a phase."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    def note(self, rank: int, **seconds: float) -> None:
        """Note how long a worker took for phases, given by name; a repeated start of a rank counts alone."""
        for name, taken in seconds.items():
            self._of_workers[name][rank] = max(0.0, taken)

    def report(self, group: str) -> StartReport:
        """Return the report of the start of a group, which has finished."""
        phases = [StartPhase(name, self._seconds.get(name, 0.0)) for name in DRIVER_PHASES]
        for name in WORKER_PHASES:
            taken = self._of_workers[name]
            slowest = sorted(taken.items(), key=lambda one: (-one[1], one[0]))[:SLOWEST]
            longest = slowest[0][1]
            median = statistics.median(taken.values())
            phases.append(StartPhase(name, self._seconds.get(name, longest), median, longest, tuple(slowest)))
        workers = len(self._of_workers["constructor"])
        return StartReport(group, workers, time.monotonic() - self._began, tuple(phases))
