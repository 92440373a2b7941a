# SPDX-License-Identifier: Apache-2.0
"""The cost of a transfer, and the way of the next one, for people and programs."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rich.filesize import decimal

from ._display import table_text
from ._plan import TransferPlan


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
        replicas_compared: whether source ranks that hold the same box have compared it.
    """

    version: int
    bytes_moved: int
    bytes_between_nodes: int
    seconds: Mapping[str, float]
    slowest: Mapping[str, int]
    total_s: float
    transports: Mapping[str, int]
    replicas_compared: bool

    def __str__(self) -> str:
        transports = ", ".join(f"{name} ({pairs} pairs)" for name, pairs in self.transports.items())
        caption = (
            f"version {self.version}: {decimal(self.bytes_moved)} moved, {decimal(self.bytes_between_nodes)} between "
            f"nodes, in {self.total_s:.3f} s, by {transports or 'no transport'}"
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
    """

    plan: TransferPlan
    transports: Mapping[tuple[int, int], str]

    def __str__(self) -> str:
        rows = [(name, str(pairs)) for name, pairs in Counter(self.transports.values()).items()]
        return table_text(str(self.plan), ("transport", "pairs of ranks"), rows)
