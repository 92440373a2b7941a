# SPDX-License-Identifier: Apache-2.0
"""The mutable record of one open group."""

from typing import Any

from ._model import Group, Lease, Sample, State
from ._policies import OpenGroup

__all__ = ["NEVER", "Record"]

# The oldest version of a group that holds nothing: newer than every version.
NEVER = 1 << 62


class Record:
    """What a ledger knows of one open group.

    Attributes:
        ordinal: the group.
        prompt: its reference.
        state: its state.
        attempt: 1, plus the leases that failed or expired.
        samples: the sealed siblings.
        carry: the parked siblings.
        lease: the current lease, or None.
        waiting: a bit for each sibling whose result the current lease still owes.
        deadline: when the current lease expires, or None.
        failed: whether a sibling of the current lease has failed.
        cancelled: whether the current lease was cancelled.
        oldest: the oldest version of anything that the group holds, or `NEVER`.
        ready_version: the trainer's version when the group was sealed.
        step: the step that has claimed it.
        version: the version that trains that step.
        target_step: the step that the policy has assigned.
    """

    __slots__ = (
        "attempt",
        "cancelled",
        "carry",
        "deadline",
        "failed",
        "lease",
        "oldest",
        "ordinal",
        "prompt",
        "ready_version",
        "samples",
        "state",
        "step",
        "target_step",
        "version",
        "waiting",
    )

    def __init__(self, ordinal: int, prompt: Any) -> None:
        self.ordinal = ordinal
        self.prompt = prompt
        self.state: State = "pending"
        self.attempt = 1
        self.samples: dict[int, Sample] = {}
        self.carry: dict[int, Sample] = {}
        self.lease: Lease | None = None
        self.waiting = 0
        self.deadline: float | None = None
        self.failed = False
        self.cancelled = False
        self.oldest = NEVER
        self.ready_version = 0
        self.step: int | None = None
        self.version = 0
        self.target_step: int | None = None

    def find_oldest(self) -> int:
        """Return the oldest version of the sealed and parked siblings, or `NEVER`."""
        held = [*self.samples.values(), *self.carry.values()]
        return min((sample.oldest_version for sample in held), default=NEVER)

    def as_group(self) -> Group:
        """Return the sealed group as a value."""
        samples = tuple([sample for _, sample in sorted(self.samples.items())])
        newest = max([sample.newest_version for sample in samples])
        return Group(self.ordinal, samples, self.oldest, newest, self.attempt)

    def as_open(self) -> OpenGroup:
        """Return the group as a policy sees it."""
        return OpenGroup(self.ordinal, self.state == "sealed", self.oldest, self.target_step)
