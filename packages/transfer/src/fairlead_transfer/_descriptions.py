# SPDX-License-Identifier: Apache-2.0
"""From what the workers say about their tensors to layouts: names, dtypes, boxes, and what does not fit."""

import difflib
import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ._layout import Layout
from .exceptions import LayoutMismatchError, Mismatch


class Described(NamedTuple):
    """One tensor as one rank describes it; the order is that of `describe` in the workers."""

    name: str  # the tensor
    library: str  # "numpy" or "torch"
    dtype: str  # the name of its dtype
    itemsize: int  # bytes of one element
    shape: tuple[int, ...]  # the global shape
    offsets: tuple[int, ...]  # where the rank's box begins
    sizes: tuple[int, ...]  # of the box


@dataclass(frozen=True)
class Selection:
    """Which tensors travel, under which names, and in which dtype."""

    rename: Callable[[str], str]  # from a name in the source to the name in the target
    dtype: str | None  # the dtype in which floating-point tensors travel; None for that of the source
    exclude: tuple[str, ...]  # patterns of names that are left out on both sides
    renamed: tuple[str, ...] = ()  # the names that the source must have, because they are to be renamed

    def excludes(self, name: str) -> bool:
        """Return whether a name is left out."""
        return name in self.exclude or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.exclude)

    def travelling(self, dtype: str) -> str:
        """Return the dtype in which a tensor travels."""
        return self.dtype if self.dtype is not None and is_floating(dtype) else dtype


@dataclass(frozen=True)
class Tensors:
    """The tensors of one side, by the name in the target."""

    layouts: dict[str, Layout] = field(default_factory=dict)  # the boxes of all ranks
    dtypes: dict[str, str] = field(default_factory=dict)  # their dtypes
    own_names: dict[str, str] = field(default_factory=dict)  # their names on this side
    library: str = "numpy"  # what they are tensors of: "numpy" or "torch"


# The dtypes in which floating-point tensors can travel, and the bytes of an element.
TRAVELLING = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


def make_selection(
    rename: Mapping[str, str] | Callable[[str], str] | None, dtype: str | None, exclude: Iterable[str]
) -> Selection:
    """Return what the arguments of a user select; TypeError or ValueError for those that select nothing sensible."""
    if dtype is not None and not isinstance(dtype, str):
        raise TypeError(f"dtype must be the name of a dtype, such as 'bfloat16', got {dtype!r}")
    if dtype is not None and dtype not in TRAVELLING:
        raise ValueError(f"dtype must be one of {', '.join(TRAVELLING)}, got {dtype!r}")
    if isinstance(exclude, str):
        raise TypeError(f"exclude must be several names or patterns, got the text {exclude!r}")
    if callable(rename):
        return Selection(rename, dtype, tuple(exclude))
    names = dict(rename or {})
    return Selection(lambda name: names.get(name, name), dtype, tuple(exclude), tuple(names))


def is_floating(dtype: str) -> bool:
    """Return whether a dtype, given by name, is a floating-point one."""
    return dtype.startswith(("float", "bfloat"))


def one_sided(side: str, name: str, held: str, reason: str) -> Mismatch:
    """Return what is wrong with a tensor of one side."""
    return Mismatch(name, held if side == "source" else "", held if side == "target" else "", reason)


def read_side(
    side: str, described: Sequence[Sequence[Sequence[Any]] | None], selection: Selection, *, renamed: bool
) -> Tensors:
    """Return the tensors of one side, on which ranks must agree; `described` has None for one that takes no part."""
    by_name: dict[str, dict[int, Described]] = {}
    own_names: dict[str, str] = {}
    wrong: list[Mismatch] = []
    libraries: set[str] = set()
    for rank, tensors in enumerate(described):
        for entry in tensors or ():
            tensor = Described(*entry)
            name = selection.rename(tensor.name) if renamed else tensor.name
            if selection.excludes(tensor.name) or selection.excludes(name):
                continue
            if own_names.setdefault(name, tensor.name) != tensor.name:
                text = f"two tensors of the {side} have this name: {own_names[name]!r} and {tensor.name!r}"
                wrong.append(one_sided(side, name, tensor.name, text))
                continue
            libraries.add(tensor.library)
            by_name.setdefault(name, {})[rank] = tensor
    own = {tensor[0] for tensors in described for tensor in tensors or ()}
    unknown = [name for name in selection.renamed if renamed and name not in own]
    reason = "rename= has this name, and the source does not: it has"
    wrong += [_explain_unknown(name, selection.rename(name), own, reason) for name in unknown]
    if len(libraries) > 1:
        wrong.append(one_sided(side, "", ", ".join(sorted(libraries)), "all tensors must be of one library"))
    layouts: dict[str, Layout] = {}
    known: dict[tuple[Any, ...], Layout] = {}
    for name, by_rank in by_name.items():
        kinds = {(tensor.dtype, tensor.shape) for tensor in by_rank.values()}
        if len(kinds) > 1:
            held = "; ".join(sorted(f"{dtype} {shape}" for dtype, shape in kinds))
            text = f"the ranks of the {side} differ in its dtype or global shape: make them equal"
            wrong.append(one_sided(side, name, held, text))
            continue
        (dtype, shape) = next(iter(kinds))
        itemsize = TRAVELLING.get(selection.travelling(dtype), next(iter(by_rank.values())).itemsize)
        key = (shape, itemsize, *((rank, tensor.offsets, tensor.sizes) for rank, tensor in by_rank.items()))
        if key not in known:
            known[key] = _make_layout(shape, by_rank, len(described), itemsize)
        layouts[name] = known[key]
    if wrong:
        raise LayoutMismatchError(tuple(wrong))
    dtypes = {name: next(iter(by_rank.values())).dtype for name, by_rank in by_name.items()}
    return Tensors(layouts, dtypes, own_names, next(iter(libraries), "numpy"))


def check_exclude(selection: Selection, source: Collection[str], target: Collection[str]) -> None:
    """Refuse names and patterns that leave out no tensor of either side, by a LayoutMismatchError with all of them."""
    names = {*source, *map(selection.rename, source), *target}
    idle = [pattern for pattern in selection.exclude if pattern not in names and not fnmatch.filter(names, pattern)]
    if idle:
        reason = "exclude= has this name or pattern, and neither side does: they have"
        raise LayoutMismatchError(tuple(_explain_unknown(pattern, "", names, reason) for pattern in idle))


def _explain_unknown(name: str, new_name: str, known: Collection[str], reason: str) -> Mismatch:
    """Return what is wrong with a name that an argument has, and no rank of one side or of both."""
    near = difflib.get_close_matches(name, known, 3, 0.5) or sorted(known)[:3]
    return Mismatch(name, "", new_name, f"{reason}, for example, {', '.join(map(repr, near)) or 'none'}")


def _make_layout(shape: tuple[int, ...], by_rank: Mapping[int, Described], ranks: int, itemsize: int) -> Layout:
    offsets = np.zeros((ranks, len(shape) or 1), np.int64)
    sizes = np.zeros_like(offsets)
    for rank, tensor in by_rank.items():
        offsets[rank] = tensor.offsets or (0,)
        sizes[rank] = tensor.sizes or (1,)
    return Layout(shape, offsets, sizes, itemsize)


def check_dtypes(source: Tensors, target: Tensors, selection: Selection) -> dict[str, Mismatch]:
    """Return the tensors whose dtypes differ without a reason."""
    wrong: dict[str, Mismatch] = {}
    for name, held in source.dtypes.items():
        wanted = target.dtypes.get(name)
        if wanted is None or held == wanted:
            continue
        if not (is_floating(held) and is_floating(wanted)):
            wrong[name] = Mismatch(name, held, wanted, "the dtypes differ; dtype= is for floating-point tensors only")
        elif selection.dtype is None:
            text = f"the dtypes differ: with dtype={wanted!r} all floating-point tensors travel in it, also equal ones"
            wrong[name] = Mismatch(name, held, wanted, text)
    return wrong


def compare_replicas(side: str, digests: Mapping[int, Mapping[Any, int]]) -> None:
    """Refuse ranks of a side that hold the same box with other bytes, by a LayoutMismatchError with these tensors."""
    seen: dict[Any, tuple[int, int]] = {}
    wrong: dict[str, Mismatch] = {}
    for rank, held in digests.items():
        for key, digest in held.items():
            other, expected = seen.setdefault(key, (rank, digest))
            if digest != expected:
                text = f"they hold the same box with different bytes, at {key[1]}: synchronise the replicas"
                wrong.setdefault(key[0], one_sided(side, key[0], f"ranks {other} and {rank}", text))
    if wrong:
        raise LayoutMismatchError(tuple(wrong.values()))


def with_ranks(tensors: Tensors, ranks: Collection[int]) -> Tensors:
    """Return the same tensors with boxes on some ranks only."""
    made: dict[Layout, Layout] = {}
    for layout in set(tensors.layouts.values()):
        others = [rank for rank in range(layout.ranks) if rank not in ranks]
        sizes = layout.sizes.copy()
        sizes[others] = 0
        made[layout] = Layout(layout.shape, layout.offsets, sizes, layout.itemsize)
    return replace(tensors, layouts={name: made[layout] for name, layout in tensors.layouts.items()})
