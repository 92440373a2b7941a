# SPDX-License-Identifier: Apache-2.0
"""A call that is not made: who would get which piece, what would be stored, who would answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray import ObjectRef

from .._arguments import PassedOn, PerWorker, Shard, is_inlined
from .._display import MOST_ROWS, table_html
from .plan import CallPlan, Column


@dataclass(frozen=True, repr=False)
class CallExplanation:
    """What a call would do; its text is a table, also in a notebook.

    Attributes:
        summary: who is called, what is stored and who answers, in a sentence.
        header: names of the columns.
        rows: one for each worker that would be called, by ascending rank.
    """

    summary: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        lines = [self.header, *self._shown()]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        shown = ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([self.summary, *shown])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return table_html(self.summary, self.header, self.rows)

    def _shown(self) -> list[tuple[str, ...]]:
        if len(self.rows) <= MOST_ROWS:
            return list(self.rows)
        half = MOST_ROWS // 2
        return [*self.rows[:half], ("...",) * len(self.header), *self.rows[-half:]]


def explain_call(
    method: str,
    plan: CallPlan,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    columns: Sequence[Column],
    named: Mapping[str, Column],
    function: bytes | None = None,
) -> CallExplanation:
    """Explain a call from its plan, its arguments as given, and these as columns. Nothing is stored or called.

    `function` is the pickled function that runs in place of a method.
    """
    mesh = plan.mesh
    names = [f"argument {at}" for at in range(len(args))] + list(kwargs)
    given = [*args, *kwargs.values()]
    every = [*columns, *named.values()]
    order = {rank: str(at) for at, rank in enumerate(plan.returned)}
    rows = []
    for at, rank in enumerate(plan.called):
        coords = mesh.sharding.get_worker_coords(rank) if mesh.names else {}
        gets = [_what(value, column, at) for value, column in zip(given, every, strict=True)]
        rows.append((str(rank), *(str(coords[name]) for name in mesh.names), *gets, order.get(rank, "no")))
    stored = {id(value) for column in every for value in column.values if not _travels(value)}
    if not _travels(function):
        stored.add(id(function))
    total = len(mesh.ranks)
    summary = (
        f"{method}: {len(plan.called)} of {total} workers called, {len(stored)} value(s) stored, "
        f"{len(plan.returned)} answer(s)"
    )
    return CallExplanation(summary, ("rank", *mesh.names, *names, "answer"), tuple(rows))


def _what(value: Any, column: Column, at: int) -> str:
    if isinstance(value, Shard):
        return f"piece {0 if column.index is None else column.index[at]}"
    if isinstance(value, PerWorker):
        return "its own"
    if isinstance(value, (ObjectRef, PassedOn)):
        return "by reference"
    return "with the call" if is_inlined(value) else "the same"


def _travels(value: Any) -> bool:
    return isinstance(value, (ObjectRef, PassedOn)) or is_inlined(value)
