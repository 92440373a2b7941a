# SPDX-License-Identifier: Apache-2.0
"""Transfers with a bound of memory: pieces cut into parts, and the board by which the ends pass them on."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import ray

from ._pieces import PieceTable
from ._remote.board import Board

# Blocks begin at multiples of this.
ALIGNED = 64
# The smallest bound. A bucket takes several messages, and a few milliseconds with them.
LEAST = 1 << 16
# Ray's object store gives memory back some time after the last reader, and small blocks are packed before they are put.
STORE_SHARE = 4
# Ends that may wait for a board at the same time.
MOST_WAITING = 100_000


def bucket_bytes(kind: str, most: int) -> int:
    """Return the size of a bucket for a transport, so that all that a process stages is at most so many bytes."""
    return most // STORE_SHARE if kind == "object_store" else most


def split_box(sizes: tuple[int, ...], itemsize: int, most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the parts of a box of at most so many bytes each: where each begins in the box, and its sizes.

    >>> list(split_box((2, 3, 4), 1, 8))
    [((0, 0, 0), (1, 2, 4)), ((0, 2, 0), (1, 1, 4)), ((1, 0, 0), (1, 2, 4)), ((1, 2, 0), (1, 1, 4))]
    """
    inner, dim = itemsize * math.prod(sizes), 0
    while inner > most:
        inner, dim = inner // sizes[dim], dim + 1
    if not dim:
        yield (0,) * len(sizes), sizes
        return
    step, rest = most // inner, sizes[dim:]
    for outer in itertools.product(*map(range, sizes[: dim - 1])):
        for begin in range(0, sizes[dim - 1], step):
            length = min(step, sizes[dim - 1] - begin)
            yield (*outer, begin, *(0,) * len(rest)), (*(1,) * len(outer), length, *rest)


def split_pieces(pieces: PieceTable, itemsize: int, most: int) -> PieceTable:
    """Return the same pieces in parts that fit into a bucket of any transport, which is at most so many bytes.

    The first parts of all pieces come first, so that all ranks that receive pieces have work at the same time.
    """
    part_bytes = most // STORE_SHARE // ALIGNED * ALIGNED
    parts = sorted(
        (number, row, begin, size)
        for row, sizes in enumerate(pieces.sizes.tolist())
        for number, (begin, size) in enumerate(split_box(tuple(sizes), itemsize, part_bytes))
    )
    rows = np.array([row for _, row, _, _ in parts], np.int64)
    begins = np.array([begin for _, _, begin, _ in parts], np.int64).reshape(len(rows), pieces.starts.shape[1])
    return replace(
        pieces,
        receivers=pieces.receivers[rows],
        starts=pieces.starts[rows] + begins,
        sizes=np.array([size for *_, size in parts], np.int64).reshape(begins.shape),
        senders=pieces.senders[:, rows],
        local=pieces.local[rows],
        via=pieces.via[rows],
    )


class Exchange:
    """The board of a link, an actor that is made when the link sends first and goes with the link.

    Args:
        most: bytes that each process may stage.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._board: Any = None

    def begin(self, epoch: int, timeout_s: float) -> Any:
        """Return the board for an attempt; what waits there for an earlier one gives up.

        Raises:
            GetTimeoutError: it did not start in time.
        """
        if self._board is not None:
            try:
                ray.get(self._board.begin.remote(epoch), timeout=timeout_s)
            except ray.exceptions.RayActorError:  # its node is lost
                self._board = None
        if self._board is None:
            made: Any = ray.remote(num_cpus=0, max_concurrency=MOST_WAITING)(Board)
            self._board = made.options(scheduling_strategy="DEFAULT").remote()
            ray.get(self._board.begin.remote(epoch), timeout=timeout_s)
        return self._board

    def close(self) -> None:
        """End the board."""
        board, self._board = self._board, None
        if board is not None and ray.is_initialized():
            ray.kill(board)
