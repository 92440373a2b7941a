# SPDX-License-Identifier: Apache-2.0
"""The tensors that methods of the user's return in one worker."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import ray

from .replies import Described
from .tensors import check_tensors, describe, look


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
        if not marks or marks != self._marks:
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

    def note_again(self, values: Any, method: str, names: Iterable[str]) -> None:
        """Note the tensors that the target holds now; ValueError if what has been staged does not fit those named."""
        expected = {entry[0]: entry[1:] for entry in self.described if entry[0] in names}
        wrong = dict(self._look(values, method))
        now = {entry[0]: entry[1:] for entry in self.described}
        wrong |= {name: "another box or dtype" for name, entry in expected.items() if now.get(name) != entry}
        if wrong:
            raise ValueError(f"the tensors of the target have changed since they were collected: {wrong}")


def find_copies(first: Mapping[str, Any], again: Any) -> list[tuple[str, str]]:
    """Return the tensors that a method returns in new memory each time, and why not to.

    `again` is the result of a second call of the method, while the tensors of the first one are kept.
    """
    second = {name: look(value)[1] for name, value in again.items()}
    why = "the method returns a copy of it each time, so new values would be lost: return the tensor itself"
    return [
        (name, why)
        for name, local in first.items()
        if 0 not in local.shape and (name not in second or look(local)[0] != look(second[name])[0])
    ]
