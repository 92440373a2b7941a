# SPDX-License-Identifier: Apache-2.0
"""The methods that a framework writes to be checked, and the job that drives them."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Job", "Run", "Step", "System", "Work"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The run that a system has to make: one epoch of the prompts 0, 1, 2, and so on, one step for each version.

    Attributes:
        prompts: the number of prompts.
        group_size: siblings for each prompt.
        groups_per_step: groups in a step.
        max_staleness: the bound in versions.
        max_attempts: failures of a group after which it is dropped.

    >>> Job(prompts=12).groups_per_step
    2
    """

    prompts: int
    group_size: int = 2
    groups_per_step: int = 2
    max_staleness: int = 1
    max_attempts: int = 3


@dataclass(frozen=True, slots=True)
class Work:
    """Siblings that a system gives to a generator.

    Attributes:
        prompt: the number of the prompt.
        siblings: the siblings to generate.
        handle: anything that the system needs to recognise the result.

    >>> Work(7, (0, 1)).prompt
    7
    """

    prompt: int
    siblings: tuple[int, ...]
    handle: Any = None


@dataclass(frozen=True, slots=True)
class Step:
    """The groups that one step trained.

    Attributes:
        samples: the prompt, the sibling and the payload of each sample.
        staleness: the version that trained them, minus the oldest version of their weights.

    >>> Step(((7, 0, "tokens"),), staleness=1).staleness
    1
    """

    samples: tuple[tuple[int, int, str], ...]
    staleness: int


class System(Protocol):
    """A framework's buffer, loader and checkpoints, driven by the cases.

    A case that needs an optional ability applies only if the attribute `capabilities` names it: "prefetch" (`train`
    accepts `claim_only`) or "durable" (finished samples survive a crash).
    """

    def start(self, job: Job) -> None:
        """Begin a job from nothing."""
        ...

    def lease(self, count: int) -> list[Work]:
        """Return up to `count` pieces of work, as many as admission allows."""
        ...

    def finish(self, work: Work, sibling: int, payload: str) -> bool:
        """Accept a finished sample; return False if it comes too late."""
        ...

    def fail(self, work: Work, sibling: int) -> None:
        """Accept that a sibling has failed."""
        ...

    def train(self, *, claim_only: bool = False) -> Step | None:
        """Train one step and publish the next version; None if no step can be trained now.

        With `claim_only` the next batch is collected and not trained, as a trainer does that prefetches.
        """
        ...

    def save(self) -> None:
        """Write a checkpoint."""
        ...

    def crash(self) -> None:
        """Lose everything that is in memory."""
        ...

    def resume(self) -> None:
        """Continue from the last checkpoint."""
        ...


@dataclass
class Run:
    """A job on a system, with an account of everything that was trained since the last checkpoint and before it."""

    system: System
    job: Job
    trained: list[tuple[int, int, str]] = field(default_factory=list)
    saved: list[tuple[int, int, str]] = field(default_factory=list)
    payloads: set[str] = field(default_factory=set)
    leased: Counter[int] = field(default_factory=Counter)
    worst: int = 0
    wrong: list[str] = field(default_factory=list)

    def lease(self, count: int = 1000) -> list[Work]:
        """Lease work, and count how often each prompt was leased."""
        found = self.system.lease(count)
        self.leased.update(work.prompt for work in found)
        return found

    def finish(self, *works: Work, tag: str = "") -> None:
        """Finish all siblings of some work."""
        for work in works:
            for sibling in work.siblings:
                payload = f"{work.prompt}-{sibling}-{self.leased[work.prompt]}{tag}"
                if self.system.finish(work, sibling, payload):
                    self.payloads.add(payload)

    def train(self) -> Step | None:
        """Train a step, if one can be trained."""
        step = self.system.train()
        if step is not None:
            self.trained += step.samples
            self.worst = max(self.worst, step.staleness)
        return step

    def save(self) -> None:
        """Write a checkpoint."""
        self.system.save()
        self.saved = list(self.trained)

    def restart(self) -> None:
        """Crash, and resume from the last checkpoint."""
        self.system.crash()
        self.system.resume()
        self.trained, self.leased = list(self.saved), Counter()

    def drain(self, works: list[Work] | None = None) -> None:
        """Finish everything, and train until nothing is left."""
        self.finish(*(works or ()))
        idle = 0
        while idle < 3:
            works = self.lease()
            self.finish(*works)
            idle = 0 if self.train() or works else idle + 1
