# SPDX-License-Identifier: Apache-2.0
"""What a group has stored, sent and fetched so far."""

from dataclasses import dataclass

from .._display import record_html

__all__ = ["GroupStatistics"]


@dataclass(frozen=True)
class GroupStatistics:
    """Counts since the group was made, its constructor arguments included.

    Attributes:
        calls: calls made on the group.
        requests: method calls sent to workers.
        puts: values stored in the object store for them.
        bytes_put: their size in bytes, as stored.
        fetched: results fetched to the driver.
        bytes_fetched: their size in bytes, as sent.

    >>> print(GroupStatistics(calls=1, requests=8, puts=2, bytes_put=4000, fetched=4, bytes_fetched=100))
    put 2 values (4 kB), sent 8 requests in 1 calls, fetched 4 results (100 B)
    """

    calls: int = 0
    requests: int = 0
    puts: int = 0
    bytes_put: int = 0
    fetched: int = 0
    bytes_fetched: int = 0

    _repr_html_ = record_html

    def __str__(self) -> str:
        return (
            f"put {self.puts} values ({_size(self.bytes_put)}), sent {self.requests} requests in {self.calls} calls, "
            f"fetched {self.fetched} results ({_size(self.bytes_fetched)})"
        )


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
