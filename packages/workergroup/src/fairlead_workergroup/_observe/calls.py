# SPDX-License-Identifier: Apache-2.0
"""The outcome of a call at one worker."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call on one worker, or one item that the worker yielded.

    Attributes:
        rank: the number of the worker in the group.
        coords: its coordinates in the group, by axis.
        value: the value that it returned; None if it failed.
        error: the exception that it raised; None if it did not fail.
    """

    rank: int
    coords: Mapping[str, int] = field(hash=False)
    value: Any = None
    error: BaseException | None = None
