# SPDX-License-Identifier: Apache-2.0
"""Orders in buckets, and the board on which they are offered, without Ray."""

import asyncio
import math
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_sharding import NamedSharding
from fairlead_transfer import Layout, reshard
from fairlead_transfer._buckets import bucket_bytes, split_box
from fairlead_transfer._descriptions import Tensors
from fairlead_transfer._orders import make_orders
from fairlead_transfer._remote.board import Board
from fairlead_transfer._remote.tensors import SLAB_BYTES, digest, library


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    itemsize=st.sampled_from([1, 2, 8, 16]),
    most=st.integers(16, 600),
)
def test_parts_of_a_box(sizes, itemsize, most):
    """The parts follow each other in row-major order, each in one run and of at most so many bytes."""
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    found = []
    for begin, part in split_box(tuple(sizes), itemsize, most):
        assert math.prod(part) * itemsize <= most
        found += numbers[tuple(slice(at, at + size) for at, size in zip(begin, part, strict=True))].ravel().tolist()
    assert found == list(range(math.prod(sizes)))


@pytest.mark.parametrize("kind", ["shared_memory", "object_store", "nixl"])
def test_orders_in_buckets(kind):
    """Every element of each target box is in one bucket that the rank reads, and no bucket is larger than the bound."""
    most = 1 << 16
    shapes = {"large": (331, 257), "other": (100, 999), "norm": (5,), "step": ()}
    train, serve = NamedSharding.from_shape(dp=3), NamedSharding.from_shape(tp=2)

    def layouts(mesh, axis):
        return {
            name: Layout.from_sharding(shape, mesh, {min(dim, len(shape) - 1): axis} if shape else {}, itemsize=4)
            for name, shape in shapes.items()
            for dim in [0 if axis == "dp" else 1]
        }

    held, wanted = layouts(train, "dp"), layouts(serve, "tp")
    plan = reshard(held, wanted, source_nodes="aab", target_nodes="ab")
    dtypes, names = dict.fromkeys(shapes, "float32"), {name: name for name in shapes}
    sides = [Tensors(one, dtypes, names) for one in (held, wanted)]
    orders = make_orders(1, plan, *sides, dtypes, lambda *pair: kind, relays=False, most=most)
    readers = {}
    for rank, mine in orders.target.items():
        seen = {
            at: np.zeros(wanted[name].sizes[rank][: max(1, len(shapes[name]))], int)
            for at, name in enumerate(plan.names)
        }
        for sender, channels in mine["sources"].items():
            for number, ordered in channels.items():
                channel = orders.source[sender]["channels"][number]
                readers.setdefault((sender, number), []).append(rank)
                for at, box, piece, (block, offset, sizes, inside) in ordered:
                    seen[at][box] += 1
                    assert inside is None
                    assert channel["pieces"][piece][0] == channel["blocks"][block][0] == at
                    assert offset + 4 * math.prod(sizes) <= channel["size"] <= bucket_bytes(kind, most)
        assert all((count == 1).all() for count in seen.values())
    for sender, mine in orders.source.items():
        for number, channel in enumerate(mine["channels"]):
            assert channel["readers"] == readers[sender, number]
    assert max(len(mine["channels"]) for mine in orders.source.values()) > 2


@pytest.mark.parametrize("shape", [(3, SLAB_BYTES // 8 + 5), (700, 701), (2, 2, SLAB_BYTES // 8 + 1), (), (0, 4)])
def test_digest_of_slabs(shape):
    """A tensor that is not in one piece has the digest of its bytes in order, and so has one that is cast."""
    tools, value = library("numpy"), np.asfortranarray(np.random.default_rng(0).standard_normal(shape))
    assert digest(tools, value, "float64") == zlib.crc32(value.tobytes())
    assert digest(tools, value, "float32") == zlib.crc32(value.astype("float32").tobytes())


def test_board():
    """An offer ends when its readers have read it or left, and all waits end when the attempt does."""

    async def check():
        board = Board()
        await board.begin(1)
        offer = asyncio.create_task(board.offer(1, 0, 0, "here", [3, 4]))
        assert await board.take(1, 0, 0) == ("", "here")
        await board.finish(1, 3, [(0, 0)])
        await asyncio.sleep(0)
        assert not offer.done()
        await board.leave(1, 4)
        assert await offer == ""
        assert await board.offer(1, 0, 1, "here", [4]) == ""  # it has left
        waiting = [asyncio.create_task(board.take(1, 9, 9)), asyncio.create_task(board.offer(1, 1, 0, "x", [5]))]
        await asyncio.sleep(0)
        await board.stop(1)
        assert await waiting[0] == ("the transfer was given up", None)
        assert await waiting[1] == "the transfer was given up"
        assert await board.offer(1, 1, 0, "x", [5]) == "the transfer was given up"
        late = asyncio.create_task(board.take(2, 0, 0))
        await board.begin(2)
        later = asyncio.create_task(board.take(2, 0, 0))
        await asyncio.sleep(0)
        await board.finish(1, 5, [(0, 0)])  # of an attempt that is over
        await board.begin(3)
        assert await later == ("another attempt has begun", None)
        assert (await late)[0] == "another attempt has begun"

    asyncio.run(asyncio.wait_for(check(), 30))
