# SPDX-License-Identifier: Apache-2.0
"""The values that pass between a ledger and its callers, and the checks of a configuration."""

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "Claim",
    "Completeness",
    "Group",
    "Lease",
    "LedgerConfig",
    "OldestFirst",
    "ReadyFirst",
    "Ref",
    "Sample",
    "Shortage",
    "State",
    "sample_id",
]

State = Literal["unseen", "pending", "leased", "finished", "claimed", "trained", "applied", "dropped"]


@dataclass(frozen=True, slots=True)
class Ref:
    """Refer to a payload, which the ledger never opens.

    Attributes:
        value: any object, such as an `ObjectRef` or a key of a store. The value of a durable reference is a string. Put
            the token of the lease into a key: if attempts shared it, the release of a late result would delete another.
        durable: whether a later process can still read the payload.
    """

    value: Any
    durable: bool = False

    def __post_init__(self) -> None:
        if not self.durable:
            return
        if not isinstance(self.value, str):
            raise ValueError(
                f"A durable reference has a string as its value, not {self.value!r}. Pass a key or a path."
            )
        try:
            self.value.encode()
        except UnicodeEncodeError as error:  # no snapshot could store it
            raise ValueError(f"The durable reference {self.value!r} is not valid UTF-8: {error}") from None


@dataclass(frozen=True, slots=True)
class Sample:
    """Describe a finished rollout.

    Attributes:
        index: its number in its group, from 0.
        ref: its payload.
        oldest_version: the oldest weights among its tokens that carry loss.
        newest_version: the newest weights among its tokens.
    """

    index: int
    ref: Ref
    oldest_version: int
    newest_version: int


@dataclass(frozen=True, slots=True)
class Lease:
    """Hold the right to generate samples of one prompt. Its token fences results of earlier leases.

    Attributes:
        prompt_id: the position of the prompt in the stream, over all epochs.
        samples: the numbers of the samples to generate.
        token: the id of this attempt.
        start_version: the version of the weights that the generator serves.
        prompt: the prompt's reference, a JSON value.
        attempt: 1, plus the leases of this group that failed or expired.
    """

    prompt_id: int
    samples: tuple[int, ...]
    token: int
    start_version: int
    prompt: Any
    attempt: int


@dataclass(frozen=True, slots=True)
class Group:
    """Describe a finished group in a claim.

    Attributes:
        prompt_id: the position of its prompt.
        samples: its samples, by index.
        oldest_version: the oldest weights in any of them.
        newest_version: the newest weights in any of them.
        attempt: 1, plus the leases of this group that failed or expired.
    """

    prompt_id: int
    samples: tuple[Sample, ...]
    oldest_version: int
    newest_version: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Claim:
    """List the groups that one step trains.

    Attributes:
        step: the step.
        version: the version of the weights that the step updates.
        groups: the groups, in the order of the policy.
    """

    step: int
    version: int
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Shortage:
    """Say why a claim took nothing.

    Attributes:
        reason: "not_enough" if too few groups are finished, "wait" if the claim waits for older groups, and
            "exhausted" if the source has ended and too few groups can ever come.
        have: the groups that the step has or could take.
        need: the groups that were requested.
        blocked_by: the unfinished groups that a claim with reason "wait" waits for.
    """

    reason: Literal["not_enough", "wait", "exhausted"]
    have: int
    need: int
    blocked_by: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completeness:
    """Say when a group is complete, and what happens to its samples when one of them fails.

    Attributes:
        min_samples: the samples that suffice once no attempt is left; None for all.
        retry: "sample" keeps finished samples for the next attempt, "group" releases them.
        max_attempts: the leases that may fail before the group is dropped, or accepted with `min_samples`.
    """

    min_samples: int | None = None
    retry: Literal["sample", "group"] = "sample"
    max_attempts: int = 3


@dataclass(frozen=True, slots=True)
class OldestFirst:
    """Let a claim take the finished groups with the oldest weights first."""


@dataclass(frozen=True, slots=True)
class ReadyFirst:
    """Let a claim take any finished group, lowest prompt id first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerConfig:
    """Set the rules of a ledger.

    Attributes:
        group_size: samples for each prompt.
        groups_per_version: groups that are trained between two updates of the weights.
        max_staleness: the bound K in versions: a claim never takes an older group. None for no bound.
        lookahead: versions that leases may run ahead of the trainer. The default is the bound; None for no limit.
        serving_lag: versions by which generators may lag behind the trainer.
        max_leased: the most groups in generation; None for no limit.
        max_open: the most groups leased or finished; None for no limit.
        policy: which finished groups a claim takes.
        on_stale: "wait" for older groups, so that none becomes too old; or "requeue" or "drop" groups that are too old.
        completeness: when a group is complete.

    >>> LedgerConfig(group_size=8, groups_per_version=32, max_staleness=1).most_open
    64
    """

    group_size: int
    groups_per_version: int
    max_staleness: int | None
    lookahead: int | Literal["max_staleness"] | None = "max_staleness"
    serving_lag: int = 0
    max_leased: int | None = None
    max_open: int | None = None
    policy: OldestFirst | ReadyFirst = field(default_factory=OldestFirst)
    on_stale: Literal["wait", "requeue", "drop"] = "wait"
    completeness: Completeness = field(default_factory=Completeness)

    @property
    def gate(self) -> int | None:
        """The versions that leases may run ahead, as a number or None."""
        return self.max_staleness if self.lookahead == "max_staleness" else self.lookahead

    @property
    def min_samples(self) -> int:
        """The samples that suffice once no attempt is left."""
        return self.group_size if self.completeness.min_samples is None else self.completeness.min_samples

    @property
    def most_open(self) -> int | None:
        """The most groups that can be open at a time, or None."""
        gated = None if self.gate is None else (self.gate + 1 - self.serving_lag) * self.groups_per_version
        return min([limit for limit in (self.max_open, gated) if limit is not None], default=None)

    def __post_init__(self) -> None:
        for least, names in (
            (1, ("group_size", "groups_per_version", "max_leased", "max_open")),
            (0, ("max_staleness", "gate", "serving_lag")),
        ):
            for name in names:
                value = getattr(self, name)
                if value is not None and value < least:
                    raise ValueError(f"{name.replace('gate', 'lookahead')} is {value}; it must be at least {least}.")
        if self.completeness.max_attempts < 1:
            raise ValueError(f"max_attempts is {self.completeness.max_attempts}; it must be at least 1.")
        for name, limit in (("lookahead", self.gate), ("max_staleness", self.max_staleness)):
            if limit is not None and self.serving_lag > limit:
                raise ValueError(f"serving_lag is {self.serving_lag}, above {name}, which is {limit}. Raise {name}.")
        least = min(2, self.group_size)
        if not least <= self.min_samples <= self.group_size:
            raise ValueError(
                f"min_samples is {self.min_samples}; with group_size {self.group_size} it must be between {least} and "
                f"{self.group_size}, because an advantage within a group needs two samples."
            )
        if self.on_stale == "wait":
            self._check_wait()

    def _check_wait(self) -> None:
        if self.max_staleness is None:
            raise ValueError('on_stale="wait" needs a bound, and max_staleness is None. Set it, or another on_stale.')
        if not isinstance(self.policy, OldestFirst):
            raise ValueError(
                f'on_stale="wait" needs the policy OldestFirst, not {type(self.policy).__name__}. '
                'With this policy use on_stale="requeue" or "drop".'
            )
        if self.gate is None or self.gate > self.max_staleness:
            raise ValueError(
                f'on_stale="wait" needs a lookahead from 0 to max_staleness, which is {self.max_staleness}, not '
                f"{self.gate}. Otherwise more groups are leased than can be trained in time."
            )


def sample_id(prompt_id: int, sample: int) -> str:
    """Return a key for a sample: the prompt id in hexadecimal, a dash, and the number of the sample.

    >>> sample_id(42, 3)
    '2a-3'
    """
    return f"{prompt_id:x}-{sample}"
