# SPDX-License-Identifier: Apache-2.0
"""The cost of a transfer, and the way of the next one, for people and programs."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ._display import as_bytes, table_text
from ._plan import TransferPlan
from ._tasks import Tasks
from .exceptions import Phase


@dataclass(frozen=True)
class TransferReport:
    """The version, bytes and times of one transfer.

    Attributes:
        version: the version that the target ranks hold now.
        bytes_moved: bytes that target ranks have fetched, also if their own process has sent them.
        bytes_between_nodes: bytes that went from one node to another.
        seconds: of the slowest rank in each phase: collect, stage, move, commit.
        slowest: that rank, by phase; of the source in collect and stage, otherwise of the target.
        total_s: seconds for all of it, as the driver saw it.
        transports: the transports in use, with the number of pairs of ranks.
        rounds: how many rounds of requests there were.
        replicas_compared: whether source ranks that hold the same box have compared it.
    """

    version: int
    bytes_moved: int
    bytes_between_nodes: int
    seconds: Mapping[str, float]
    slowest: Mapping[str, int]
    total_s: float
    transports: Mapping[str, int]
    rounds: int
    replicas_compared: bool

    def __str__(self) -> str:
        transports = ", ".join(f"{name} ({pairs} pairs)" for name, pairs in self.transports.items())
        caption = (
            f"version {self.version}: {as_bytes(self.bytes_moved)} moved, {as_bytes(self.bytes_between_nodes)} between "
            f"nodes, in {self.total_s:.3f} s and {self.rounds} rounds, by {transports or 'no transport'}"
            f"{', replicas compared' if self.replicas_compared else ''}"
        )
        rows = [(phase, f"{took:.3f}", str(self.slowest.get(phase, ""))) for phase, took in self.seconds.items()]
        return table_text(caption, ("phase", "seconds", "slowest rank"), rows)


@dataclass(frozen=True, eq=False)
class TransferExplanation:
    """How the tensors of a link travel. Print it.

    Attributes:
        plan: who sends which piece to whom.
        transports: for each pair of a source rank and a target rank that exchange pieces, the transport.
        reasons: for each transport in use, why it was chosen.
    """

    plan: TransferPlan
    transports: Mapping[tuple[int, int], str]
    reasons: Mapping[str, str]

    def __str__(self) -> str:
        moved, bound = as_bytes(self.plan.bytes_moved), as_bytes(self.plan.lower_bound)
        counts = Counter(self.transports.values())
        rows = [(name, str(pairs), self.reasons.get(name, "")) for name, pairs in counts.items()]
        caption = f"{moved} move between processes; the lower bound is {bound}"
        return f"{self.plan}\n" + table_text(caption, ("transport", "pairs of ranks", "why"), rows)


@dataclass
class Costs:
    """What one attempt has cost, from the replies of the workers."""

    rounds: int = 0  # of requests
    bytes_moved: int = 0  # which target ranks have fetched
    _measured: list[tuple[str, float, int]] = field(default_factory=list)

    def note(self, phase: Phase, rank: int, seconds: float) -> None:
        """Note how long a phase took on a rank."""
        self._measured.append((phase, seconds, rank))

    def report(
        self, version: int, plan: TransferPlan, tasks: Tasks, total_s: float, *, compared: bool
    ) -> TransferReport:
        """Return the report of a transfer."""
        seconds: dict[str, float] = {}
        slowest: dict[str, int] = {}
        for phase, took, rank in self._measured:
            if took >= seconds.get(phase, 0.0):
                seconds[phase], slowest[phase] = took, rank
        return TransferReport(
            version,
            self.bytes_moved,
            plan.bytes_between_nodes,
            seconds,
            slowest,
            total_s,
            dict(Counter(tasks.transports.values())),
            self.rounds,
            compared,
        )
