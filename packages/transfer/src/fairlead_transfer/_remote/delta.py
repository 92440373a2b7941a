# SPDX-License-Identifier: Apache-2.0
"""What has changed in the tensors of a source rank since the last version, and how a target rank applies it.

A patch of a piece is the elements that have changed and where they are. Positions travel as the gaps between them, in
1, 2 or 4 bytes. A gap that is too long for that is cut by elements that travel although they have not changed.
"""

import ctypes
import importlib
import importlib.util
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ray

from .staging import Context
from .tensors import as_bytes, nbytes, span
from .transport import fetch_stored

# Elements in a row that may travel as one: the choice is what takes the fewest bytes.
UNITS = 1, 8, 64, 512
WIDTHS = 1, 2, 4
# Elements that are compared at a time, so that the result stays in the processor's cache.
CHUNK = 1 << 15
# Elements of a block that has one digest, where no copy is kept.
BLOCK = 1024


class Patch(NamedTuple):
    """How one piece has changed: `units` runs of `unit` elements each; a unit of 0 stands for all of the piece.

    The gaps and the elements are in the two buffers of the channel, from these offsets on.
    """

    digest: bytes | None  # of the piece that the target must have; None if it may have any
    unit: int
    units: int
    width: int  # bytes of a gap
    gaps_at: int
    values_at: int


class Change(NamedTuple):
    """A patch that a target rank has staged; one without positions says what an unchanged part must be."""

    at: int  # the number of the tensor
    box: tuple[slice, ...]  # the part of it
    where: Any  # the positions in that part, in row-major order
    values: Any  # the bytes of the elements
    digest: bytes  # of the piece before


def find_lack() -> str:
    """Return why this process can neither make nor apply patches; an empty text if it can."""
    lacking = [name for name in ("numpy", "xxhash") if importlib.util.find_spec(name) is None]
    return f"its Python has no {' and no '.join(lacking)}" if lacking else ""


def _numpy() -> Any:
    return importlib.import_module("numpy")


def _hash(data: Any) -> bytes:
    """Return a digest of 16 bytes; two data that differ have the same one with no probability that matters."""
    found: bytes = importlib.import_module("xxhash").xxh3_128_digest(data)
    return found


def _split(now: Any) -> Iterator[tuple[int, Any]]:
    """Yield the parts of a piece, and at which row each begins."""
    step = max(1, CHUNK // max(1, math.prod(now.shape[1:])))
    for begin in range(0, len(now), step):
        yield begin, now[begin : begin + step]


def _hash_parts(now: Any) -> Iterator[bytes]:
    """Yield the digest of each part of a piece."""
    for _, part in _split(now):
        yield _hash(_numpy().ascontiguousarray(part))


def _hash_piece(now: Any) -> bytes:
    """Return the digest of a piece, which is that of the digests of its parts."""
    return _hash(b"".join(_hash_parts(now)))


class _Copy:
    """A copy of a piece, to find the elements that have changed, and digests of its parts.

    A part is compared with the copy only if its digest is another one: the digest reads half as much.
    """

    least = 1  # elements that travel together

    def __init__(self, now: Any) -> None:
        self._before = now.copy(order="C")
        self._parts = self._latest = list(_hash_parts(self._before))

    def digest(self) -> bytes:
        """Return the digest of the piece before."""
        return _hash(b"".join(self._parts))

    def find_changed(self, now: Any) -> Any:
        """Return the positions of the elements that differ."""
        np, row = _numpy(), math.prod(now.shape[1:])
        self._latest, found = [], []
        for (begin, part), before, latest in zip(_split(now), self._parts, _hash_parts(now), strict=True):
            self._latest.append(latest)
            if latest != before:
                differ = part != self._before[begin : begin + len(part)]
                found.append(np.flatnonzero(differ) + begin * row)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def update(self, now: Any, where: Any) -> None:
        """Keep the present elements at the positions that have changed."""
        self._before.reshape(-1)[where] = _take(now, where)
        self._parts = self._latest


class _Digests:
    """Digests of the blocks of a piece, to find the blocks that have changed; no copy is kept."""

    least = BLOCK

    def __init__(self, now: Any) -> None:
        self._blocks = self._latest = _hash_blocks(now)
        self._whole = _hash_piece(now)

    def digest(self) -> bytes:
        """Return the digest of the piece before."""
        return self._whole

    def find_changed(self, now: Any) -> Any:
        """Return where the blocks begin that differ."""
        self._latest = _hash_blocks(now)
        pairs = enumerate(zip(self._latest, self._blocks, strict=True))
        return _numpy().array([number * BLOCK for number, (new, old) in pairs if new != old], "int64")

    def update(self, now: Any, where: Any) -> None:
        """Keep the digests that `find_changed` has made."""
        if len(where):
            self._blocks, self._whole = self._latest, _hash_piece(now)


class Base:
    """What a source rank has sent last, as a copy or as digests of its blocks.

    Attributes:
        epoch: of the attempt that sent it; -1 if there is none.
    """

    def __init__(self) -> None:
        self.epoch = -1
        self._pieces: Any = None
        self._in_blocks = False
        self._kept: list[list[_Copy | _Digests]] = []  # by channel and piece

    def follow(
        self, context: Context, epoch: int, delta: tuple[int, bool, bool] | None, verify: bool
    ) -> tuple[str, list[dict[str, Any]]]:
        """Keep what is sent now; return why it has to travel as a whole, or the channels of what has changed.

        `delta` has the epoch of the version that all targets hold; whether digests of blocks are kept and no copy; and
        whether targets compare the digests of pieces that have not changed, too, as with `verify`. None keeps nothing.
        """
        reason = "" if delta is None else self.explain_whole(context.orders, *delta[:2])
        if delta is not None and not reason:
            return "", self.stage(context, epoch, verify or delta[2])
        self.epoch, self._kept = -1, []
        if delta is not None and not find_lack():
            self.keep(context, epoch, delta[1])
        return reason, []

    def explain_whole(self, orders: Mapping[str, Any], since: int, in_blocks: bool) -> str:
        """Return why the tensors have to travel as a whole; an empty text if patches can be made."""
        if lack := find_lack():
            return lack
        if since < 0 or (since, in_blocks, _find_pieces(orders)) != (self.epoch, self._in_blocks, self._pieces):
            return "it keeps no copy of the version that the targets hold"
        return ""

    def keep(self, context: Context, epoch: int, in_blocks: bool) -> None:
        """Keep what is sent as a whole now."""
        self.epoch, self._pieces, self._in_blocks = epoch, _find_pieces(context.orders), in_blocks
        kind = _Digests if in_blocks else _Copy
        channels = context.orders["channels"]
        self._kept = [[kind(_read(context, *piece)) for piece in channel["pieces"]] for channel in channels]

    def stage(self, context: Context, epoch: int, verify: bool) -> list[dict[str, Any]]:
        """Store what has changed in each channel, and keep the present state."""
        # Until all is kept: what fails in between leaves nothing to compare with.
        since, self.epoch = self.epoch, -1
        channels = []
        for channel, pieces in zip(context.orders["channels"], self._kept, strict=True):
            patches: list[Patch | None] = []
            gaps, values, changed, elements = bytearray(), bytearray(), 0, 0
            for kept, piece in zip(pieces, channel["pieces"], strict=True):
                now = _read(context, *piece)
                where = kept.find_changed(now)
                elements += now.size
                changed += min(now.size, len(where) * kept.least)
                if not len(where) and not verify:
                    patches.append(None)
                    continue
                patches.append(_encode(now, where, kept.digest(), kept.least, gaps, values))
                kept.update(now, where)
            used = any(patches)
            # As plain tuples: the class would travel with them.
            rows = [None if patch is None else tuple(patch) for patch in patches]
            ref = ray.put([rows, *map(pickle.PickleBuffer, (gaps, values))]) if used else None
            size = len(gaps) + len(values)
            channels.append(
                {"kind": "patch", "patch": ref, "since": since, "bytes": size, "counts": (changed, elements)}
            )
        self.epoch = epoch
        return channels


def _find_pieces(orders: Mapping[str, Any]) -> Any:
    """Return what identifies the pieces of all channels; a plan that is made again has another number."""
    return orders["names"], orders["dtypes"], [channel["pieces"] for channel in orders["channels"]]


def _read(context: Context, at: int, box: tuple[slice, ...]) -> Any:
    """Return the elements of a piece as they travel, as whole numbers: equal means equal in each bit."""
    np, tools, dtype = _numpy(), context.tools, context.orders["dtypes"][at]
    value, itemsize = context.part(at, box), nbytes(tools, (), dtype)
    kind = f"u{itemsize}" if itemsize in (1, 2, 4, 8) else f"V{itemsize}"
    device, address, strides = tools.memory(value)
    if device != "cpu" or tools.dtype_name(value) != dtype or 0 in value.shape:
        return np.frombuffer(as_bytes(tools, value, dtype), kind).reshape(tuple(value.shape))
    # Where they are, also if they are strided. Not through numpy(): see `TorchLibrary.as_buffer`.
    _, begin, end = span(tools, value)
    memory = (ctypes.c_ubyte * (end - begin)).from_address(begin)
    return np.ndarray(tuple(value.shape), kind, memory, address - begin, strides)


def _take(now: Any, where: Any) -> Any:
    """Return the elements at some positions, in row-major order."""
    return now.reshape(-1)[where] if now.flags.c_contiguous else now[_numpy().unravel_index(where, now.shape)]


def _hash_blocks(now: Any) -> list[bytes]:
    """Return the digest of each block."""
    flat = _numpy().ascontiguousarray(now).reshape(-1)
    return [_hash(flat[begin : begin + BLOCK]) for begin in range(0, len(flat), BLOCK)]


def _encode(now: Any, where: Any, before: bytes, least: int, gaps: bytearray, values: bytearray) -> Patch:
    """Add gaps and elements to the buffers of a channel, in the units and the width that take the fewest bytes."""
    np = _numpy()
    places = len(gaps), len(values)
    if not len(where):
        return Patch(before, 1, 0, 1, *places)
    best: tuple[int, int, int, Any] = (now.nbytes, 0, 0, None)
    for unit in (one * least for one in UNITS):
        units = where // unit
        units = units[np.diff(units, prepend=-1) > 0]
        between = np.diff(units, prepend=-1) - 1
        for width in WIDTHS:
            fillers = between >> 8 * width
            size = (len(units) + int(fillers.sum())) * (unit * now.itemsize + width)
            if size < best[0]:
                best = size, unit, width, (between, fillers)
    _, unit, width, found = best
    if not unit:
        values += now.tobytes()
        return Patch(None, 0, 1, 1, *places)
    between, fillers = found
    limit = (1 << 8 * width) - 1
    steps = np.full(len(between) + int(fillers.sum()), limit, f"u{width}")
    steps[np.cumsum(fillers + 1) - 1] = between & limit
    gaps += steps.tobytes()
    values += _take(now, _positions(steps, unit, now.size)).tobytes()
    return Patch(before, unit, len(steps), width, *places)


def _positions(steps: Any, unit: int, length: int) -> Any:
    """Return the positions of all elements of the units that follow each other with these gaps."""
    np = _numpy()
    units = np.cumsum(steps.astype(np.int64) + 1) - 1
    positions = (units[:, None] * unit + np.arange(unit)).ravel()
    return positions[positions < length]


class Unpatched(Exception):
    """A target rank cannot apply patches, and needs whole tensors; says why."""


def fetch_patches(
    context: Context, channel: Mapping[str, Any], ordered: Sequence[Any], deadline: float
) -> tuple[int, list[Any], list[Change]]:
    """Get the patches of a channel, and compare what this target rank holds with what they are for.

    Returns:
        How many bytes less came than of whole tensors, the pieces that came as a whole, and the patches.

    Raises:
        Unpatched: the tensors are not what they were when the version was committed.
        Late, Lost: the patches did not come.
    """
    tools, orders = context.tools, context.orders
    parts = [(at, box, patch, context.part(at, box)) for at, box, patch, _ in ordered]
    saved = sum(nbytes(tools, value.shape, orders["dtypes"][at]) for at, _, _, value in parts)
    if channel["patch"] is None:
        return saved, [], []
    if lack := find_lack():
        raise Unpatched(lack)
    np = _numpy()
    rows, gaps, values = fetch_stored(channel["patch"], deadline)
    pieces: list[Any] = []
    changes: list[Change] = []
    for at, box, place, value in parts:
        if rows[place] is None:
            continue
        patch = Patch(*rows[place])
        dtype, sizes = orders["dtypes"][at], tuple(value.shape)
        if not patch.unit:
            pieces.append((at, box, tools.view(values, dtype, patch.values_at, sizes)))
            saved -= nbytes(tools, sizes, dtype)
            continue
        if _hash_piece(_read(context, at, box)) != patch.digest:
            name, kept = orders["names"][at], tools.dtype_name(value)
            less = f", or keeps less of it as {kept} than travels as {dtype}: then give the link dtype={kept!r}"
            raise Unpatched(f"it has changed {name!r} since the last version{less if kept != dtype else ''}")
        steps = np.frombuffer(gaps, f"u{patch.width}", patch.units, patch.gaps_at)
        where = _positions(steps, patch.unit, math.prod(sizes))
        end = patch.values_at + nbytes(tools, where.shape, dtype)
        changes.append(Change(at, box, where, memoryview(values)[patch.values_at : end], patch.digest))
        saved -= steps.nbytes + end - patch.values_at
    return saved, pieces, changes


def check_changes(context: Context, changes: Sequence[Change]) -> None:
    """Refuse patches of tensors that a method of the user's has changed since they were fetched.

    Raises:
        ValueError: one is not what its patch is for.
    """
    for at, box, _, _, before in changes:
        if _hash_piece(_read(context, at, box)) != before:
            name = context.orders["names"][at]
            raise ValueError(f"before_commit has changed {name!r}; send the version again without delta=")


def apply_changes(context: Context, changes: Sequence[Change]) -> None:
    """Overwrite what has changed in the tensors of a target."""
    for at, box, where, values, _ in changes:
        context.tools.scatter(context.part(at, box), where, values, context.orders["dtypes"][at])
