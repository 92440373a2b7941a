# SPDX-License-Identifier: Apache-2.0
"""The end of a wait, changes that wait until then, and the check of timeouts."""

import math
from dataclasses import dataclass, field

from ._world import now
from .exceptions import LateWorker, ResizeTimeoutError


def check_timeout(name: str, seconds: float | None) -> float | None:
    """Return a timeout in seconds, or None for no limit."""
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"{name} must be a number of seconds or None, got {seconds!r}")
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{name} must be finite and not negative, or None for no limit, got {seconds!r}")
    return float(seconds)


@dataclass(frozen=True)
class Deadline:
    """A moment of `now`, or never.

    >>> Deadline.after(None).left(), Deadline.after(None).left(at_most=5.0)
    (None, 5.0)
    """

    at: float | None = None

    @classmethod
    def after(cls, seconds: float | None) -> "Deadline":
        """Return the deadline that is this many seconds from now."""
        return cls(None if seconds is None else now() + seconds)

    def sooner(self, other: "Deadline") -> "Deadline":
        """Return the earlier of two deadlines."""
        moments = [deadline.at for deadline in (self, other) if deadline.at is not None]
        return Deadline(min(moments, default=None))

    def left(self, at_most: float | None = None) -> float | None:
        """Return the seconds until the deadline, 0 after it, and not more than `at_most`; None without a limit."""
        if self.at is None:
            return at_most
        left = max(0.0, self.at - now())
        return left if at_most is None else min(left, at_most)

    @property
    def passed(self) -> bool:
        """Whether the deadline has passed, with a millisecond of tolerance for waits that end early."""
        return self.at is not None and now() >= self.at - 0.001


NEVER = Deadline()


@dataclass(frozen=True)
class Operation:
    """A change of a group, which waits for calls and for other threads before it begins an epoch."""

    what: str  # its description, for errors
    deadline: Deadline  # when these waits end
    began: float = field(default_factory=now)  # when it was requested, by `now`

    def late_error(self, reason: str, late: tuple[LateWorker, ...] = ()) -> ResizeTimeoutError:
        """Return the error of a wait that has taken too long."""
        return ResizeTimeoutError(self.what, now() - self.began, late, reason)
