# SPDX-License-Identifier: Apache-2.0
"""The mutable record of one open group, and that of one step."""

from dataclasses import dataclass, field
from typing import Any

from ._model import Group, Lease, Sample, State
from ._policies import OpenGroup

__all__ = ["NEVER", "Record", "StepClaim"]

# The oldest version of a group that holds nothing: newer than every version.
NEVER = 1 << 62


@dataclass(slots=True, eq=False)
class Record:
    """The record of one open group."""

    prompt_id: int
    prompt: Any
    attempt: int
    state: State = "pending"
    samples: dict[int, Sample] = field(default_factory=dict)  # the finished ones
    lease: Lease | None = None
    waiting: int = 0  # a bit for each sample that the lease owes
    deadline: float | None = None  # of the lease
    failed: bool = False  # whether a sample of the lease has failed
    failure: str = ""  # why a sample has failed last
    oldest: int = NEVER  # the oldest version of anything that the group holds
    step: int | None = None  # the step that has claimed it
    version: int = 0  # the version that trains this step

    def find_oldest(self) -> int:
        """Return the oldest version of the finished samples, or `NEVER`."""
        return min([sample.oldest_version for sample in self.samples.values()], default=NEVER)

    def as_group(self) -> Group:
        """Return the finished group as a value."""
        samples = tuple([sample for _, sample in sorted(self.samples.items())])
        newest = max([sample.newest_version for sample in samples])
        return Group(self.prompt_id, samples, self.oldest, newest, self.attempt)

    def as_open(self) -> OpenGroup:
        """Return the group as a policy sees it."""
        return OpenGroup(self.prompt_id, self.state == "finished", self.oldest)


@dataclass(slots=True, eq=False)
class StepClaim:
    """The claim of one step that has not been applied."""

    version: int  # the version that it updates
    places: int  # of the groups of this version; a step that takes fewer groups than requested uses up all of them
    prompt_ids: list[int] = field(default_factory=list)
    unfilled: int = 0  # the places of groups that were dropped from the claim, which the step may claim again
