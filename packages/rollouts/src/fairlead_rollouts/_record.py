# SPDX-License-Identifier: Apache-2.0
"""The mutable record of one open group."""

from dataclasses import dataclass, field
from typing import Any

from ._model import Group, Lease, Sample, State
from ._policies import OpenGroup

__all__ = ["NEVER", "Record"]

# The oldest version of a group that holds nothing: newer than every version.
NEVER = 1 << 62


@dataclass(slots=True, eq=False)
class Record:
    """The record of one open group."""

    ordinal: int
    prompt: Any
    attempt: int
    state: State = "pending"
    samples: dict[int, Sample] = field(default_factory=dict)  # sealed siblings
    lease: Lease | None = None
    waiting: int = 0  # a bit for each sibling that the lease owes
    deadline: float | None = None  # of the lease
    failed: bool = False  # whether a sibling of the lease has failed
    failure: str = ""  # why a sibling has failed last
    oldest: int = NEVER  # the oldest version of anything that the group holds
    ready_version: int = 0  # the trainer's version when it was sealed
    step: int | None = None  # the step that has claimed it
    version: int = 0  # the version that trains this step

    def find_oldest(self) -> int:
        """Return the oldest version of the sealed siblings, or `NEVER`."""
        return min([sample.oldest_version for sample in self.samples.values()], default=NEVER)

    def as_group(self) -> Group:
        """Return the sealed group as a value."""
        samples = tuple([sample for _, sample in sorted(self.samples.items())])
        newest = max([sample.newest_version for sample in samples])
        return Group(self.ordinal, samples, self.oldest, newest, self.attempt)

    def as_open(self) -> OpenGroup:
        """Return the group as a policy sees it."""
        return OpenGroup(self.ordinal, self.state == "sealed", self.oldest)
