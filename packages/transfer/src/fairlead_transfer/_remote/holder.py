# SPDX-License-Identifier: Apache-2.0
"""The tensors of a worker as an end of a link knows them."""

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import ray

from .agent import explain_missing
from .entry import SHARED
from .faults import commit_fault
from .tensors import check_tensors, check_writable, describe, library, look, overlap, span


class Holder:
    """The part of an end that calls methods of the user's and describes tensors; the key is as for `End`."""

    def __init__(self, key: tuple[str, str]) -> None:
        self._key = key
        self._epoch = -1
        self._values: Mapping[str, Any] = {}
        self._marks: list[Any] = []
        self._number = 0
        self._described: list[tuple[Any, ...]] = []
        self._orders: dict[str, Any] = {}
        self._method: str | None = None  # returns the tensors of a target
        self._committed: tuple[int, int] | None = None
        # The memory of the committed version, until another link overwrites it.
        self._claimed: list[tuple[str, int, int]] = []

    def _enter(self, epoch: int) -> dict[str, Any] | None:
        """Note the attempt; return the reply to a superseded one."""
        if epoch < self._epoch:
            return {"superseded": self._epoch}
        self._epoch = epoch
        return None

    async def _call(self, worker: Any, method: str | None, *args: Any) -> Any:
        """Call a method of the user's, of any kind; nothing if there is no name."""
        result = getattr(worker, method)(*args) if method is not None else None
        while inspect.isawaitable(result) and not isinstance(result, ray.ObjectRef):
            result = await result
        return result

    async def _collect(self, worker: Any, epoch: int, method: str, known: int) -> dict[str, Any]:
        commit_fault(self._key[1], "collect")
        values = await self._call(worker, method)
        if epoch < self._epoch:  # the method has let another attempt pass
            return {"superseded": self._epoch}
        if wrong := self._look(values, method):
            return {"number": self._number, "refused": wrong}
        if self._number == known:
            return {"number": known, "tensors": None}
        return {"number": self._number, "tensors": self._described, "lacks": {"nixl": explain_missing()}}

    def _look(self, values: Any, method: str) -> list[tuple[str, str]]:
        """Note the tensors that a method has returned; if some are refused, return their names and the reasons."""
        try:
            looked = {name: look(value) for name, value in values.items()}
        except (AttributeError, TypeError, ValueError):
            looked = {}  # `check_tensors` says what is wrong
        marks = [(name, mark) for name, (mark, _) in looked.items()]
        if not marks or marks != self._marks:
            if wrong := check_tensors(values, method):
                return wrong
            # Only the storage may have changed, of which the driver knows nothing.
            described = [(name, *describe(value)) for name, value in values.items()]
            if described != self._described or not self._number:
                self._number, self._described = self._number + 1, described
            self._marks = marks
        self._values = {name: local for name, (_, local) in looked.items()}
        return []

    async def _look_again(self, worker: Any) -> None:
        """Note the tensors that the target holds now; `before` may have replaced those that were collected.

        Raises:
            ValueError: what has been staged does not fit them.
        """
        if self._method is None:
            return
        names = self._orders["names"]
        expected = {one[0]: one[1:-1] for one in self._described if one[0] in names}  # on any device
        wrong = dict(self._look(await self._call(worker, self._method), self._method))
        wrong = wrong or {name: why for name, why in check_writable(self._values) if name in names}
        found = {one[0]: one[1:-1] for one in self._described}
        wrong |= {name: "another box or dtype" for name, one in expected.items() if found.get(name) != one}
        if wrong:
            raise ValueError(f"the tensors of the target have changed since they were collected: {wrong}")

    def _claim(self, apply: str | None) -> list[str]:
        """Note what this end overwrites; return the ids of the links whose tensors are among that.

        What a method of the user's takes is known by its name and the names of the tensors.
        """
        names = self._orders["names"]
        if apply is not None:
            self._claimed = [(f"{apply} {name}", 0, 1) for name in names]
        else:
            own = (one for one in map(self._values.get, names) if one is not None and 0 not in one.shape)
            self._claimed = [span(self._tools(), one) for one in own]
        lost = []
        shared: Any = sys.modules[SHARED]
        for (link, _), end in shared.ends.items():
            if end is not self and overlap(self._claimed, end._claimed):  # noqa: SLF001  of the same class
                end._claimed, end._committed = [], None  # noqa: SLF001
                lost.append(link)
        return lost

    def _tools(self) -> Any:
        return library(self._orders["library"])

    def _tensors(self) -> list[Any]:
        """Return the tensors by their numbers in the orders; None for those that this rank does not hold."""
        return [self._values.get(name) for name in self._orders["names"]]
