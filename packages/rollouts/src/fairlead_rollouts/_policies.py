# SPDX-License-Identifier: Apache-2.0
"""Which finished groups a claim takes, as pure functions of a view of the open groups."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

__all__ = ["OldestFirst", "OpenGroup", "Policy", "ReadyFirst", "View"]


class OpenGroup(NamedTuple):
    """One open group, as a policy sees it.

    Attributes:
        prompt_id: the position of its prompt in the stream.
        ready: whether it is finished, so that a claim may take it.
        oldest_version: the oldest weights in its samples; the start version while nothing is finished.
    """

    prompt_id: int
    ready: bool
    oldest_version: int


@dataclass(frozen=True, slots=True)
class View:
    """The open groups at one claim. Finished groups that are too old are not among them.

    Attributes:
        version: the version that will train this step.
        max_staleness: the bound K, or None.
        groups: leased and finished groups, and pending groups that hold samples.
    """

    version: int
    max_staleness: int | None
    groups: tuple[OpenGroup, ...]

    def ready(self) -> list[OpenGroup]:
        """Return the finished groups, lowest prompt id first."""
        return sorted(group for group in self.groups if group.ready)


class Policy(Protocol):
    """The choice of finished groups for a step.

    A policy of your own that is used with `on_stale="wait"` extends `OldestFirst`. It has to prefer older groups, so
    that waiting for an unfinished group helps.
    """

    def select(self, view: View, count: int) -> tuple[int, ...]:
        """Return the prompt ids of at most `count` finished groups, in the order of their training."""
        ...


def _take(groups: Iterable[OpenGroup], count: int) -> tuple[int, ...]:
    return tuple([group.prompt_id for group in groups][:count])


@dataclass(frozen=True, slots=True)
class OldestFirst:
    """Take the groups with the oldest weights first.

    >>> view = View(version=2, max_staleness=2, groups=(OpenGroup(0, True, 2), OpenGroup(1, True, 1)))
    >>> OldestFirst().select(view, 1)
    (1,)
    """

    def select(self, view: View, count: int) -> tuple[int, ...]:
        """Return the oldest finished groups."""
        return _take(sorted(view.ready(), key=lambda group: group.oldest_version), count)


@dataclass(frozen=True, slots=True)
class ReadyFirst:
    """Take any finished group, lowest prompt id first.

    >>> view = View(version=2, max_staleness=None, groups=(OpenGroup(0, False, 0), OpenGroup(1, True, 2)))
    >>> ReadyFirst().select(view, 2)
    (1,)
    """

    def select(self, view: View, count: int) -> tuple[int, ...]:
        """Return finished groups by prompt id."""
        return _take(view.ready(), count)
