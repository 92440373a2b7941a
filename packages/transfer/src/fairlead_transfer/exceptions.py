# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a transfer, one class per situation."""

from dataclasses import dataclass

from ._display import table_text

__all__ = ["LayoutMismatchError", "Mismatch"]


@dataclass(frozen=True)
class Mismatch:
    """A tensor that does not fit between the source and the target.

    Attributes:
        name: the tensor.
        source: what the source has.
        target: what the target has.
        reason: why they do not fit, and what to do.
    """

    name: str
    source: str
    target: str
    reason: str


class LayoutMismatchError(ValueError):
    """The source and the target do not hold the same tensors. Nothing has moved.

    Attributes:
        mismatches: one entry for each tensor that does not fit.
    """

    def __init__(self, mismatches: tuple[Mismatch, ...]) -> None:
        super().__init__(mismatches)
        self.mismatches = mismatches

    def __str__(self) -> str:
        rows = [(one.name, one.source, one.target, one.reason) for one in self.mismatches]
        caption = f"{len(rows)} tensors do not fit between the source and the target; nothing has moved:"
        return table_text(caption, ("tensor", "source", "target", "reason"), rows)
