# SPDX-License-Identifier: Apache-2.0
"""The fate of every ordinal that is no longer open, at two bits each."""

from dataclasses import dataclass, field

__all__ = ["SettledOrdinals"]


@dataclass(slots=True)
class SettledOrdinals:
    """Record which ordinals are applied or dropped."""

    frontier: int = 0  # every ordinal below it is settled
    applied: int = 0
    dropped: int = 0
    settled_bits: bytearray = field(default_factory=bytearray)
    dropped_bits: bytearray = field(default_factory=bytearray)

    def add(self, ordinal: int, *, dropped: bool) -> None:
        """Settle an open ordinal."""
        place, bit = ordinal >> 3, 1 << (ordinal & 7)
        if place >= len(self.settled_bits):
            missing = place + 1024 - len(self.settled_bits)
            self.settled_bits.extend(bytes(missing))
            self.dropped_bits.extend(bytes(missing))
        self.settled_bits[place] |= bit
        if dropped:
            self.dropped_bits[place] |= bit
            self.dropped += 1
        else:
            self.applied += 1
        while ordinal == self.frontier and self.is_settled(ordinal):
            self.frontier = ordinal = ordinal + 1

    def is_settled(self, ordinal: int) -> bool:
        """Return whether an ordinal is applied or dropped."""
        place = ordinal >> 3
        return place < len(self.settled_bits) and bool(self.settled_bits[place] >> (ordinal & 7) & 1)

    def is_dropped(self, ordinal: int) -> bool:
        """Return whether an ordinal is dropped."""
        place = ordinal >> 3
        return place < len(self.dropped_bits) and bool(self.dropped_bits[place] >> (ordinal & 7) & 1)
