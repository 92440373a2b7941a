# SPDX-License-Identifier: Apache-2.0
"""What is told of a call: the outcome of each worker, and what it cost."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .._display import record_html

__all__ = ["CallStatistics", "Outcome"]


@dataclass(frozen=True)
class Outcome:
    """What one worker made of a call, or one item of what it yields.

    Attributes:
        rank: its number in the group.
        coords: its coordinates in the group, by axis.
        value: what it answered; None if it failed.
        error: what it failed with; None if it did not.
    """

    rank: int
    coords: Mapping[str, int] = field(hash=False)
    value: Any = None
    error: BaseException | None = None

    _repr_html_ = record_html


@dataclass(frozen=True)
class CallStatistics:
    """What one call has cost.

    Attributes:
        requests: method calls sent to workers.
        puts: values stored in the object store for it.
        bytes_put: their size in bytes, as stored.
        fetched: results fetched to the driver so far.
        bytes_fetched: their size in bytes, as sent.
        submit_s: seconds from the call to the last request.
    """

    requests: int
    puts: int
    bytes_put: int
    fetched: int
    bytes_fetched: int
    submit_s: float

    _repr_html_ = record_html
