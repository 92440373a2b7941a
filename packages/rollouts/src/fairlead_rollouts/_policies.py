# SPDX-License-Identifier: Apache-2.0
"""Which finished groups a claim takes, as pure functions of a view of the open groups."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

__all__ = [
    "InOrder",
    "OldestFirst",
    "OpenGroup",
    "Policy",
    "ReadyFirst",
    "Selection",
    "View",
    "WeightFifo",
    "Windowed",
]


class OpenGroup(NamedTuple):
    """One open group, as a policy sees it.

    Attributes:
        ordinal: the position of its prompt in the stream.
        ready: whether it is sealed, so that a claim may take it.
        oldest_version: the oldest weights in its samples; the start version while nothing is sealed.
        target_step: the step that `InOrder` has assigned to it.
    """

    ordinal: int
    ready: bool
    oldest_version: int
    target_step: int | None = None


@dataclass(frozen=True, slots=True)
class View:
    """The open groups at one claim. Finished groups that are too old are not among them.

    Attributes:
        step: the step that claims.
        version: the version that will train this step.
        max_staleness: the bound K, or None.
        groups: leased and sealed groups, and pending groups that hold samples.
    """

    step: int
    version: int
    max_staleness: int | None
    groups: tuple[OpenGroup, ...]

    def ready(self) -> list[OpenGroup]:
        """Return the sealed groups, lowest ordinal first.

        >>> View(step=1, version=0, max_staleness=1, groups=(OpenGroup(4, True, 0), OpenGroup(2, True, 0))).ready()[0]
        OpenGroup(ordinal=2, ready=True, oldest_version=0, target_step=None)
        """
        return sorted(group for group in self.groups if group.ready)


@dataclass(frozen=True, slots=True)
class Selection:
    """The choice of a policy.

    Attributes:
        ordinals: sealed groups in the order in which they are trained, at most as many as requested.
        blocked_by: groups that the policy waits for, if it selects too few although other groups are sealed.
    """

    ordinals: tuple[int, ...]
    blocked_by: tuple[int, ...] = ()


class Policy(Protocol):
    """The choice of finished groups for a step.

    A policy of your own that is used with `on_stale="wait"` extends `OldestFirst`, `InOrder` or `WeightFifo`. It has to
    prefer older groups, so that waiting for an unfinished group helps.
    """

    def select(self, view: View, count: int) -> Selection:
        """Return at most `count` sealed groups of the view."""
        ...


def _take(groups: Iterable[OpenGroup], count: int) -> tuple[int, ...]:
    return tuple([group.ordinal for group in groups][:count])


@dataclass(frozen=True, slots=True)
class OldestFirst:
    """Take the groups with the oldest weights first.

    >>> view = View(step=1, version=2, max_staleness=2, groups=(OpenGroup(0, True, 2), OpenGroup(1, True, 1)))
    >>> OldestFirst().select(view, 1)
    Selection(ordinals=(1,), blocked_by=())
    """

    def select(self, view: View, count: int) -> Selection:
        """Return the oldest sealed groups."""
        return Selection(_take(sorted(view.ready(), key=lambda group: group.oldest_version), count))


@dataclass(frozen=True, slots=True)
class ReadyFirst:
    """Take any finished group, lowest ordinal first.

    >>> view = View(step=1, version=2, max_staleness=None, groups=(OpenGroup(0, False, 0), OpenGroup(1, True, 2)))
    >>> ReadyFirst().select(view, 2)
    Selection(ordinals=(1,), blocked_by=())
    """

    def select(self, view: View, count: int) -> Selection:
        """Return sealed groups by ordinal."""
        return Selection(_take(view.ready(), count))


@dataclass(frozen=True, slots=True)
class InOrder:
    """Train the groups of a step as they were leased: each lease carries its target step.

    Attributes:
        groups_per_step: groups with the same target step.
        first_step: the first step of the run.

    >>> view = View(step=1, version=0, max_staleness=1, groups=(OpenGroup(0, True, 0, 1), OpenGroup(1, True, 0, 2)))
    >>> InOrder(groups_per_step=1).select(view, 1)
    Selection(ordinals=(0,), blocked_by=())
    """

    groups_per_step: int
    first_step: int = 1

    def __post_init__(self) -> None:
        if self.groups_per_step < 1:
            raise ValueError(f"groups_per_step is {self.groups_per_step}; it must be at least 1.")

    def select(self, view: View, count: int) -> Selection:
        """Return the sealed groups whose target is the step of the view."""
        of_step = [group for group in view.groups if group.target_step == view.step]
        chosen = _take(sorted(group for group in of_step if group.ready), count)
        blocked_by = tuple(sorted(group.ordinal for group in of_step if not group.ready))
        return Selection(chosen, blocked_by if len(chosen) < count else ())


@dataclass(frozen=True, slots=True)
class WeightFifo:
    """Finish the oldest version before the next one: wait for its unfinished groups too.

    >>> view = View(step=1, version=2, max_staleness=2, groups=(OpenGroup(0, False, 1), OpenGroup(1, True, 2)))
    >>> WeightFifo().select(view, 1)
    Selection(ordinals=(), blocked_by=(0,))
    """

    def select(self, view: View, count: int) -> Selection:
        """Return sealed groups of the oldest version among all open groups."""
        # A group in generation that is too old is never claimed, so waiting for it is of no use.
        first = 0 if view.max_staleness is None else view.version - view.max_staleness
        versions = (group.oldest_version for group in view.groups)
        oldest = min((version for version in versions if version >= first), default=None)
        of_version = sorted(group for group in view.groups if group.oldest_version == oldest)
        chosen = _take((group for group in of_version if group.ready), count)
        blocked_by = tuple(group.ordinal for group in of_version if not group.ready)
        return Selection(chosen, blocked_by if len(chosen) < count else ())


@dataclass(frozen=True, slots=True)
class Windowed:
    """Take any finished group within the bound, by ordinal or the freshest first.

    Attributes:
        freshest_first: whether groups with newer weights come first.

    >>> view = View(step=1, version=2, max_staleness=2, groups=(OpenGroup(0, True, 1), OpenGroup(1, True, 2)))
    >>> Windowed(freshest_first=True).select(view, 1)
    Selection(ordinals=(1,), blocked_by=())
    """

    freshest_first: bool = False

    def select(self, view: View, count: int) -> Selection:
        """Return sealed groups by ordinal, or by version and then by ordinal."""
        ready = view.ready()
        if self.freshest_first:
            ready.sort(key=lambda group: -group.oldest_version)
        return Selection(_take(ready, count))
