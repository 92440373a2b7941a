# SPDX-License-Identifier: Apache-2.0
"""The fate of every prompt that is no longer open, at two bits each."""

from dataclasses import dataclass, field, replace

__all__ = ["SettledPrompts"]


@dataclass(slots=True)
class SettledPrompts:
    """Record which prompts are applied or dropped."""

    frontier: int = 0  # every prompt below it is settled
    applied: int = 0
    dropped: int = 0
    settled_bits: bytearray = field(default_factory=bytearray)
    dropped_bits: bytearray = field(default_factory=bytearray)

    def copy(self) -> "SettledPrompts":
        """Return a copy that later calls do not change."""
        return replace(self, settled_bits=self.settled_bits[:], dropped_bits=self.dropped_bits[:])

    def add(self, prompt_id: int, *, dropped: bool) -> None:
        """Settle an open prompt."""
        place, bit = prompt_id >> 3, 1 << (prompt_id & 7)
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
        while prompt_id == self.frontier and self.is_settled(prompt_id):
            self.frontier = prompt_id = prompt_id + 1

    def undo_drop(self, prompt_id: int) -> None:
        """Make a dropped prompt open again."""
        place, mask = prompt_id >> 3, ~(1 << (prompt_id & 7))
        self.settled_bits[place] &= mask
        self.dropped_bits[place] &= mask
        self.dropped -= 1
        self.frontier = min(self.frontier, prompt_id)

    def skip(self, count: int) -> None:
        """Count the first prompts as applied, in an empty record: another data source has given them out."""
        self.settled_bits = bytearray(b"\xff" * (count // 8) + bytes([(1 << count % 8) - 1]))
        self.dropped_bits = bytearray(len(self.settled_bits))
        self.frontier = self.applied = count

    def is_settled(self, prompt_id: int) -> bool:
        """Return whether a prompt is applied or dropped."""
        place = prompt_id >> 3
        return place < len(self.settled_bits) and bool(self.settled_bits[place] >> (prompt_id & 7) & 1)

    def is_dropped(self, prompt_id: int) -> bool:
        """Return whether a prompt is dropped."""
        place = prompt_id >> 3
        return place < len(self.dropped_bits) and bool(self.dropped_bits[place] >> (prompt_id & 7) & 1)
