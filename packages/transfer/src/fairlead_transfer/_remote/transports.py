# SPDX-License-Identifier: Apache-2.0
"""The ways of a channel from a source rank to a target rank, for one end.

Within a node, a target rank maps the segments of source ranks. Between nodes, one target rank of each node reads them
over TCP into segments of its own, which the other ranks of its node map: so every byte enters a node once. Ray's object
store works between any two processes of a cluster.
"""

import contextlib
import mmap
import os
import pickle
import time
from collections.abc import Callable, Collection
from collections.abc import Mapping as Dict
from typing import Any

import ray

from .replies import Place
from .segment import Mapping, Segments, Unread
from .server import Reader, Wish, serve
from .sockets import Late, Listener, listen

ADVICE = "give the link transport='object_store'"
# What writes the content of a channel.
Write = Callable[[memoryview], None]


class SharedMemory:
    """The transport between processes of one node that can map each other's memory."""

    def __init__(self) -> None:
        self._segments = Segments()
        self._mapped: dict[Place, Mapping] = {}
        self._used: list[tuple[Mapping, int]] = []

    def stage(self, number: int, size: int, write: Write, fresh: bool) -> Any:
        """Make the content of a channel available; return what a target rank needs to find it.

        `fresh` keeps what was staged before for a target that may still use it. RuntimeError if this process cannot use
        the transport.
        """
        try:
            content = self._segments.begin(number, size, fresh=fresh)
        except (AttributeError, OSError) as error:
            text = f"it has no anonymous file (memfd_create): {type(error).__name__}: {error}"
            raise RuntimeError(f"{text}: {ADVICE}") from error
        write(content)
        return self._segments.end(number)

    def fetch(self, place: Place, staged: Any, deadline: float) -> Any:
        """Return the content of a channel, which is valid until its source stages again; Unread if that fails."""
        mapped = self._mapped.get(place)
        if mapped is None or mapped.token != staged[3]:
            try:
                mapped = self._mapped[place] = Mapping(staged)
            except (OSError, ValueError) as error:
                why = f"its memory cannot be opened, {type(error).__name__}: {error}; if it is alive, {ADVICE}"
                raise Unread("lost", place[0], why) from error
        if not mapped.holds(staged[4]):
            raise Unread("overwritten", place[0], "what it had staged was overwritten before it was read")
        self._used.append((mapped, staged[4]))
        return mapped.content()

    def is_unchanged(self) -> bool:
        """Return whether all that was fetched since the last `release` still is what was staged."""
        return all(mapped.holds(generation) for mapped, generation in self._used)

    def release(self) -> None:
        """Forget what was fetched; the segments stay mapped."""
        self._used = []

    def keep_only(self, numbers: Collection[int]) -> None:
        """Give back what this source rank has staged in other channels than these."""
        self._segments.keep_only(numbers)

    def forget_others(self, places: Collection[Place]) -> None:
        """Unmap other channels than these: the memory of a process that has ended goes with the last map."""
        for place in set(self._mapped).difference(places):
            del self._mapped[place]

    def close(self) -> None:
        """Give everything back."""
        self._segments.close()


class Network(SharedMemory):
    """The transport between nodes. `stage` says where a channel can be read, and `relay` reads it."""

    def __init__(self) -> None:
        super().__init__()
        self._secret = os.urandom(32)
        self._listener: Listener | None = None
        self._address: tuple[str, int] = ("", 0)
        self._relays = Segments()
        self._reader = Reader()

    def stage(self, number: int, size: int, write: Write, fresh: bool) -> Any:
        """Write the content into a segment, and offer it to readers on other nodes."""
        if self._listener is None:
            host = ray.util.get_node_ip_address()
            try:
                listening = listen(host)
            except OSError as error:
                raise RuntimeError(f"it cannot listen on {host}: {error}: {ADVICE}") from error
            self._address = listening.getsockname()
            segments = self._segments
            self._listener = Listener(listening, self._secret, lambda caller, connection: serve(connection, segments))
        _, _, size, token, generation = super().stage(number, size, write, fresh)
        return self._address, self._secret, size, token, generation

    def relay(self, staged: Dict[Place, Any], fresh: bool, deadline: float) -> dict[Place, Any]:
        """Read channels of source ranks into segments of this process; return where ranks of this node find them.

        What was read of other channels before is given back. `fresh` is as for `stage`. Unread if it does not work.
        """
        self._relays.keep_only(staged)
        wishes: dict[int, list[Wish]] = {}
        for place, (address, secret, size, token, generation) in staged.items():
            content = self._relays.begin(place, size, fresh=fresh)
            wishes.setdefault(place[0], []).append(Wish(tuple(address), secret, token, generation, [content]))
        self._reader.keep_only(wishes)
        try:
            self._reader.read(wishes, deadline)
        except Unread as error:
            if error.outcome != "lost":
                raise
            raise Unread("lost", error.source, f"{error}; if it is alive, {ADVICE}") from error
        return {place: self._relays.end(place) for place in staged}

    def close(self) -> None:
        """Give everything back."""
        if self._listener is not None:
            self._listener.close()
        self._relays.close()
        self._reader.close()
        super().close()


class ObjectStore(SharedMemory):
    """Ray's object store: one value for each channel, which Ray brings to each node once, and which never changes."""

    def stage(self, number: int, size: int, write: Write, fresh: bool) -> Any:
        """Store the content; it goes with the last reference."""
        content = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # of a kernel without huge pages
            content.madvise(mmap.MADV_HUGEPAGE)  # writing the content takes a third of the time
        write(memoryview(content))
        return ray.put([pickle.PickleBuffer(content)])

    def fetch(self, place: Place, staged: Any, deadline: float) -> Any:
        """Return the value in the object store of this node."""
        try:
            return fetch_value(staged, deadline)[0]
        except Late as error:
            raise Unread("late", place[0], "what it has stored did not arrive by the deadline") from error
        except ray.exceptions.RayError as error:
            raise Unread("lost", place[0], " ".join(str(error).split())[:200]) from error


def fetch_value(ref: ray.ObjectRef[Any], deadline: float) -> Any:
    """Return the value of a reference, or raise Late; Ray warns of `ray.get` on every thread of an asyncio actor."""
    future = ref.future()
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError as error:
        if future.done():  # it came at the last moment, or this is the task's own error
            return future.result()
        raise Late from error
