# SPDX-License-Identifier: Apache-2.0
"""The cost of a transfer, and the way of the next one, for people and programs."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ._display import as_bytes, table_html, table_text
from ._orders import Orders
from ._plan import TransferPlan


@dataclass(frozen=True)
class DeltaReport:
    """The changes that a send with `delta` has found, and the bytes that it has saved.

    Attributes:
        changed: elements of the source that have changed; with `delta="blocks"`, those of blocks that have.
        elements: elements that have been compared.
        bytes_saved: bytes of tensors that did not have to travel.
        whole: why tensors travelled as a whole, one entry for each rank that was the reason; empty if patches did.

    >>> print(DeltaReport(30, 1000, 4096, ()))
    3 % of 1,000 elements changed, 4 KiB saved
    """

    changed: int
    elements: int
    bytes_saved: int
    whole: tuple[str, ...]

    @property
    def density(self) -> float:
        """The part of the compared elements that have changed; 0 if none was compared."""
        return self.changed / self.elements if self.elements else 0.0

    def __str__(self) -> str:
        compared = f"{100 * self.density:.3g} % of {self.elements:,} elements changed, "
        saved = f"{compared if self.elements else ''}{as_bytes(self.bytes_saved)} saved"
        return "\n".join([saved, *(f"whole tensors, because {why}" for why in self.whole)])


@dataclass(frozen=True)
class TransferReport:
    """The version, bytes and times of one transfer.

    Attributes:
        version: the version that the target ranks hold now.
        bytes_moved: bytes that went from one process to another.
        bytes_between_nodes: bytes that went from one node to another.
        seconds: of the slowest rank in each phase: collect, stage, move, verify, commit.
        slowest: that rank, by phase; of the source in collect and stage, otherwise of the target.
        total_s: seconds for all of it, as the driver saw it.
        transports: the transports in use, with the number of pairs of ranks.
        rounds: how many rounds of requests there were.
        verified: whether digests were compared.
        delta: what `send(delta=...)` has saved; None for a send without it.
    """

    version: int
    bytes_moved: int
    bytes_between_nodes: int
    seconds: Mapping[str, float]
    slowest: Mapping[str, int]
    total_s: float
    transports: Mapping[str, int]
    rounds: int
    verified: bool
    delta: DeltaReport | None = None

    def _caption(self) -> str:
        transports = ", ".join(f"{name} ({pairs} pairs)" for name, pairs in self.transports.items())
        return (
            f"version {self.version}: {as_bytes(self.bytes_moved)} moved, {as_bytes(self.bytes_between_nodes)} between "
            f"nodes, in {self.total_s:.3f} s and {self.rounds} rounds, by {transports or 'no transport'}"
            f"{', digests compared' if self.verified else ''}{'' if self.delta is None else f'; {self.delta}'}"
        )

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for phase, seconds in self.seconds.items():
            yield phase, f"{seconds:.3f}", str(self.slowest.get(phase, ""))

    def __str__(self) -> str:
        return table_text(self._caption(), ("phase", "seconds", "slowest rank"), list(self._rows()))

    def _repr_html_(self) -> str:
        return table_html(self._caption(), ("phase", "seconds", "slowest rank"), list(self._rows()))


@dataclass(frozen=True, eq=False)
class TransferExplanation:
    """How the tensors of a link travel. Print it, or look at it in a notebook.

    Attributes:
        plan: who sends which piece to whom.
        transports: for each pair of a source rank and a target rank that exchange pieces, the transport.
        reasons: for each transport in use, why it was chosen.
    """

    plan: TransferPlan
    transports: Mapping[tuple[int, int], str]
    reasons: Mapping[str, str]

    def _rows(self) -> list[tuple[str, str, str]]:
        counts = Counter(self.transports.values())
        return [(name, str(pairs), self.reasons.get(name, "")) for name, pairs in counts.items()]

    def _bound(self) -> str:
        plan = self.plan
        return f"{as_bytes(plan.bytes_moved)} move between processes; the lower bound is {as_bytes(plan.lower_bound)}"

    def __str__(self) -> str:
        return f"{self.plan}\n" + table_text(self._bound(), ("transport", "pairs of ranks", "why"), self._rows())

    def _repr_html_(self) -> str:
        header = "transport", "pairs of ranks", "why"
        return self.plan._repr_html_() + table_html(self._bound(), header, self._rows())


@dataclass
class Costs:
    """What one attempt has cost, from the replies of the workers.

    Attributes:
        rounds: of requests.
        bytes_moved, bytes_saved: from one process to another, and by patches.
        whole: why tensors travelled as a whole although patches were wanted.
    """

    rounds: int = 0
    bytes_moved: int = 0
    bytes_saved: int = 0
    whole: list[str] = field(default_factory=list)
    _measured: list[tuple[str, float, int]] = field(default_factory=list)

    def note(self, rank: int, reply: Mapping[str, Any], *phases: str) -> None:
        """Note the times of phases in a reply, and the bytes that this rank has fetched."""
        self._measured += [(phase, reply[f"{phase}_s"], rank) for phase in phases if f"{phase}_s" in reply]
        self.bytes_moved += reply.get("bytes", 0)
        self.bytes_saved += reply.get("saved", 0)

    def report(
        self,
        version: int,
        orders: Orders,
        staged: Mapping[int, Any],
        nodes: tuple[Sequence[str], Sequence[str]],
        total_s: float,
        *,
        verified: bool,
        delta: bool,
    ) -> TransferReport:
        """Return the report of a transfer, given what each source rank has staged and the nodes of both sides."""
        seconds: dict[str, float] = {}
        slowest: dict[str, int] = {}
        for phase, took, rank in self._measured:
            if took >= seconds.get(phase, 0.0):
                seconds[phase], slowest[phase] = took, rank
        return TransferReport(
            version,
            self.bytes_moved,
            _count_between_nodes(orders, staged, nodes),
            seconds,
            slowest,
            total_s,
            dict(Counter(orders.transports.values())),
            self.rounds,
            verified,
            self._report_delta(staged) if delta else None,
        )

    def _report_delta(self, staged: Mapping[int, Any]) -> DeltaReport:
        counts = [one["counts"] for reply in staged.values() for one in reply["channels"] if one["kind"] == "patch"]
        whole = [f"source rank {rank}: {reply['whole']}" for rank, reply in sorted(staged.items()) if "whole" in reply]
        changed, elements = (sum(numbers) for numbers in zip((0, 0), *counts, strict=True))
        return DeltaReport(changed, elements, self.bytes_saved, tuple(self.whole or whole))


def _count_between_nodes(orders: Orders, staged: Mapping[int, Any], nodes: tuple[Sequence[str], Sequence[str]]) -> int:
    """Return the bytes that went from one node to another; a patch is stored once and goes to each node once."""
    if not any(one["kind"] == "patch" for reply in staged.values() for one in reply["channels"]):
        return orders.bytes_between_nodes
    ways = {
        (sender, number, nodes[1][rank])
        for rank, mine in orders.target.items()
        for sender, channels in mine["sources"].items()
        for number in channels
    }
    return sum(
        staged[sender]["channels"][number].get("bytes", orders.source[sender]["channels"][number]["size"])
        for sender, number, node in ways
        if nodes[0][sender] != node
    )
