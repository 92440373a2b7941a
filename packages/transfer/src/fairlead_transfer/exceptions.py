# SPDX-License-Identifier: Apache-2.0
"""The errors of transfers, one class per situation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ._display import table_text

__all__ = ["LayoutMismatchError", "Mismatch", "RankFailure", "StaleWeightsError", "TransferError"]

Phase = Literal["collect", "stage", "move", "commit"]
Role = Literal["source", "target"]
# What a target rank holds: a version, nothing yet, a mixture of two versions, or the old one or the new one.
State = int | Literal["inconsistent", "committing"] | None


@dataclass(frozen=True)
class Mismatch:
    """A tensor that does not fit between the source and the target.

    Attributes:
        name: the tensor.
        source: what the source has.
        target: what the target has.
        reason: why they do not fit, and what to do.
    """

    name: str
    source: str
    target: str
    reason: str


class LayoutMismatchError(ValueError):
    """The source and the target do not hold the same tensors. Nothing has been applied.

    Attributes:
        mismatches: one entry for each tensor that does not fit.
    """

    def __init__(self, mismatches: tuple[Mismatch, ...]) -> None:
        super().__init__(mismatches)
        self.mismatches = mismatches

    def __str__(self) -> str:
        rows = [(mismatch.name, mismatch.source, mismatch.target, mismatch.reason) for mismatch in self.mismatches]
        what = "1 tensor does not fit" if len(rows) == 1 else f"{len(rows)} tensors do not fit"
        caption = f"{what} between the source and the target; nothing has been applied:"
        return table_text(caption, ("tensor", "source", "target", "reason"), rows)


@dataclass(frozen=True)
class RankFailure:
    """Why one rank kept a transfer from ending.

    Attributes:
        side: "source" or "target".
        rank: its number in its group.
        node_id: Ray's id of its node.
        reason: what happened.

    >>> print(RankFailure("target", 3, "abcdef0123", "it was killed"))
    target rank 3 on node abcdef01: it was killed
    """

    side: Role
    rank: int
    node_id: str
    reason: str

    def __str__(self) -> str:
        return f"{self.side} rank {self.rank} on node {self.node_id[:8]}: {self.reason}"


class StaleWeightsError(Exception):
    """A call was refused, because some of its ranks do not hold the last version of a link that guards them.

    Attributes:
        method: the method that was called.
        needed: the last version; None if nothing has been sent yet.
        held: what each of these ranks holds, as in `Link.versions`.
    """

    def __init__(self, method: str, needed: int | None, held: Mapping[int, State]) -> None:
        super().__init__(method, needed, held)
        self.method = method
        self.needed = needed
        self.held: dict[int, State] = dict(held)

    def __str__(self) -> str:
        if self.needed is None:
            return f"{self.method!r} was not called: no version has been sent yet. Send a version first."
        rows = [(str(rank), "nothing" if state is None else str(state)) for rank, state in self.held.items()]
        caption = (
            f"{self.method!r} was not called: {len(self.held)} rank(s) do not hold version {self.needed}. "
            "Bring them up with `sync()` of the link."
        )
        return table_text(caption, ("rank", "holds"), rows)


class TransferError(Exception):
    """A transfer has failed, or did not end by its deadline.

    In every phase but "commit", all target ranks hold what they held before. In "commit" the decision has been taken:
    the next `send`, or `sync`, brings the ranks forward that have not confirmed it.

    You do not get this for tensors that do not fit, which is a `LayoutMismatchError`, or for a group that has been shut
    down.

    Attributes:
        phase: "collect", "stage", "move" or "commit".
        version: the version that was sent.
        failures: one entry for each rank that failed.
        versions: what each target rank holds, as in `Link.versions`.
        remedy: what to do.
    """

    def __init__(
        self,
        phase: Phase,
        version: int,
        failures: tuple[RankFailure, ...],
        versions: Mapping[int, State],
        remedy: str,
    ) -> None:
        super().__init__(phase, version, failures, versions, remedy)
        self.phase: Phase = phase
        self.version = version
        self.failures = failures
        self.versions: dict[int, State] = dict(versions)
        self.remedy = remedy

    def __str__(self) -> str:
        lines = [f"version {self.version} was not transferred, in phase {self.phase!r}:"]
        lines += [f"  {failure}" for failure in self.failures[:16]]
        lines += [f"  and {len(self.failures) - 16} others"] if len(self.failures) > 16 else []
        if self.phase == "commit":
            counts: dict[str, list[int]] = {}
            for rank, state in self.versions.items():
                counts.setdefault("nothing" if state is None else str(state), []).append(rank)
            held = "; ".join(f"{state}: ranks {', '.join(map(str, ranks[:16]))}" for state, ranks in counts.items())
            lines.append(f"The target ranks hold {held}.")
        else:
            lines.append("All target ranks hold what they held before.")
        return "\n".join([*lines, self.remedy])
