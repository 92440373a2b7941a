# SPDX-License-Identifier: Apache-2.0
"""The tensors that methods of the user's return in one worker."""

import collections
import inspect
from collections.abc import Collection as Names
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray

from .replies import Described
from .tensors import check_tensors, check_writable, describe, digest, is_same_memory, look, memory_of


async def call(worker: Any, method: str | None, *args: Any) -> Any:
    """Call a method of the user's, of any kind; nothing if there is no name."""
    result = getattr(worker, method)(*args) if method is not None else None
    while inspect.isawaitable(result) and not isinstance(result, ray.ObjectRef):
        result = await result
    return result


class Collection:
    """The tensors of one end, as they were collected last."""

    def __init__(self) -> None:
        self.values: Mapping[str, Any] = {}  # the part of each that this process holds; empty between two attempts
        self.number = 0  # of the description; 0 if there is none
        self.described: list[tuple[Any, ...]] = []
        self.moves = 0  # how often the tensors were in other memory than before
        self.has_moved = False  # whether they were the last time
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
        """Note the tensors that the target holds now; ValueError if what has been staged does not fit those named."""
        expected = {entry[0]: entry[1:] for entry in self.described if entry[0] in names}
        wrong = dict(self._look(values, method))
        wrong = wrong or {name: why for name, why in check_writable(self.values) if name in names}
        found = {entry[0]: entry[1:] for entry in self.described}
        wrong |= {name: "another box or dtype" for name, entry in expected.items() if found.get(name) != entry}
        if wrong:
            raise ValueError(f"the tensors of the target have changed since they were collected: {wrong}")

    def find_copies(self, again: Any, names: Names[str] | None = None) -> list[tuple[str, str]]:
        """Return the tensors, of these names or all, that a method returns in new memory each time, and why not to.

        `again` is the result of a second call of the method, while the values of the first one are kept.
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


def find_clashing(
    tools: Any, tensors: Sequence[Any], pieces: Iterable[tuple[int, Any, Any]], tasks: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Return the tensors of a target that get something else than another one in the same memory: names and reasons."""
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
