# SPDX-License-Identifier: Apache-2.0
"""The tensors that methods of the user's return in one worker."""

import collections
import inspect
from collections.abc import Collection as Names
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray

from .replies import Described
from .tensors import check_tensors, check_writable, describe, digest, is_same_memory, look, memory_of, resolve


async def call(worker: Any, method: str | None, *args: Any) -> Any:
    """Call a method of the user's, of any kind; nothing if there is no name."""
    result = getattr(worker, method)(*args) if method is not None else None
    while inspect.isawaitable(result) and not isinstance(result, ray.ObjectRef):
        result = await result
    return result


class Collection:
    """The tensors of one end, as they were collected last.

    Attributes:
        values: the part of each tensor that this process holds; empty between two attempts.
        number: of the description; 0 if there is none.
        described: the description.
        moves: how often the tensors were in other memory than before.
        has_moved: whether they were the last time.
    """

    def __init__(self) -> None:
        self.values: Mapping[str, Any] = {}
        self.number = 0
        self.described: list[tuple[Any, ...]] = []
        self.moves = 0
        self.has_moved = False
        self._marks: list[Any] = []

    def note(self, values: Any, method: str, known: int) -> Described:
        """Note what a method has returned; return the reply to a driver that knows the description of a number."""
        if wrong := self._look(values, method):
            return Described(number=self.number, refused=wrong)
        return Described(number=self.number, tensors=None if self.number == known else self.described)

    def _look(self, values: Any, method: str) -> list[tuple[str, str]]:
        """Note the tensors that a method has returned; if some are refused, return their names and the reasons."""
        try:
            looked = {name: look(value) for name, value in values.items()}
        except (AttributeError, TypeError, ValueError):
            looked = {}  # `check_tensors` says what is wrong
        marks = [(name, mark) for name, (mark, _) in looked.items()]
        self.has_moved = not marks or marks != self._marks
        if self.has_moved:
            self.moves += 1
            if wrong := check_tensors(values, method):
                return wrong
            # Only the storage may have changed, of which the driver knows nothing.
            described = [(name, *describe(value)) for name, value in values.items()]
            if described != self.described or not self.number:
                self.number, self.described = self.number + 1, described
            self._marks = marks
        self.values = {name: local for name, (_, local) in looked.items()}
        return []

    def note_again(self, values: Any, method: str, names: Names[str]) -> None:
        """Note the tensors that the target holds now; `before` may have replaced those that were collected.

        Raises:
            ValueError: what has been staged does not fit those with these names.
        """
        expected = {entry[0]: entry[1:] for entry in self.described if entry[0] in names}
        wrong = dict(self._look(values, method))
        wrong = wrong or {name: why for name, why in check_writable(self.values) if name in names}
        found = {entry[0]: entry[1:] for entry in self.described}
        wrong |= {name: "another box or dtype" for name, entry in expected.items() if found.get(name) != entry}
        if wrong:
            raise ValueError(f"the tensors of the target have changed since they were collected: {wrong}")

    def find_copies(self, again: Any, names: Names[str] | None = None) -> list[tuple[str, str]]:
        """Return the tensors that a method returns in new memory each time, with the reason why they are refused.

        Args:
            again: the result of a second call of the method, while the values of the first one are kept.
            names: the tensors in question; None for all.
        """
        first, second = self.values, {name: look(value)[1] for name, value in again.items()}
        why = "the method returns a copy of it each time, so new values would be lost: return the tensor itself"
        return [
            (name, why)
            for name, local in first.items()
            if (names is None or name in names)
            and 0 not in local.shape
            and (name not in second or not is_same_memory(local, second[name]))
        ]

    def resolve(self) -> None:
        """Have the memory of the values hold them; that of a lazy conjugate or negative does not."""
        self.values = {name: resolve(local) for name, local in self.values.items()}


def find_clashing(
    tools: Any, tensors: Sequence[Any], pieces: Iterable[tuple[int, Any, Any]], tasks: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Return the tensors that get something else than another one with the same memory: names and reasons.

    Args:
        tools: the library of the tensors.
        tensors: of the target, by their numbers; None for those that a method of the user's takes.
        pieces: for each its tensor, the box there, and the value.
        tasks: of the end.
    """
    memories = {index: memory_of(tools, local) for index, local in enumerate(tensors) if local is not None}
    counts = collections.Counter(memories.values())
    gets: dict[int, dict[str, int]] = {index: {} for index, memory in memories.items() if counts[memory] > 1}
    for index, box, value in pieces:
        if index in gets:
            gets[index][str(box)] = digest(tools, value, tasks["dtypes"][index])
    wrong, owners = [], dict[Any, int]()
    for index, digests in gets.items():
        owner = owners.setdefault(memories[index], index)
        if digests != gets[owner]:
            first = tasks["names"][owner]
            why = f"the target keeps it in the memory of {first!r}, and they differ in the source: exclude one of them"
            wrong.append((tasks["names"][index], why))
    return wrong
