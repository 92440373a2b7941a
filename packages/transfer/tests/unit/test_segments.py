# SPDX-License-Identifier: Apache-2.0
"""The memory that the ends of a link share: what it holds, and when it goes."""

import concurrent.futures
import gc
import os
import socket
import time
import types
from pathlib import Path

import numpy as np
import pytest
import ray

from fairlead_transfer import LocalTensor
from fairlead_transfer._remote import segment
from fairlead_transfer._remote.replies import Described
from fairlead_transfer._remote.segment import NAME, Mapping, Segment, Segments, Unread
from fairlead_transfer._remote.server import Reader, Wish, serve
from fairlead_transfer._remote.sockets import BATCH, Listener, listen, shut
from fairlead_transfer._remote.transports import fetch_value

from ..ends import Ends, Worker
from ..engines import leave_nothing, open_files


def test_segment_is_read_as_a_whole_or_refused():
    """A reader sees that the content was written since, or is being written, and that the token is another one."""
    segment = Segment(100)
    segment.begin()[:3] = b"abc"
    description = segment.end()
    mapped = Mapping(description)
    assert bytes(mapped.content()[:3]) == b"abc"
    assert mapped.holds(description[4])
    content = segment.begin()
    assert not mapped.holds(description[4])
    content[:3] = b"xyz"
    later = segment.end()
    assert not mapped.holds(description[4])
    assert mapped.holds(later[4])
    with pytest.raises(OSError, match="another segment"):
        Mapping((*description[:3], b"0" * 16, 1))
    with pytest.raises(OSError, match="No such file"):
        Mapping((description[0], 10_000, *description[2:]))
    segment.close()
    segment.close()
    assert bytes(mapped.content()[:3]) == b"xyz"


def test_segment_that_was_written_meanwhile_is_not_used():
    """A target that is late, so that the source has staged again, does not take the new bytes for the old ones."""
    ends = Ends([Worker({"a": np.ones(4)})], [Worker({"a": np.zeros(4)})])
    ends.plan()
    staged = ends.stage()
    ends.stage()
    (reply,) = ends.fetch(staged, 1)
    assert (reply.outcome, reply.source) == ("overwritten", 0)


def test_segment_that_was_written_before_the_commit_is_not_used():
    """A commit does not use memory that has been written since; new memory is staged while a target may still read."""
    ends = Ends([Worker({"a": np.ones(4)})], [Worker({"a": np.zeros(4)})])
    ends.plan()
    ends.fetch(ends.stage(), 1)
    ends.stage(fresh=True)
    assert ends.commit(1)[0].version == 1
    ends.fetch(ends.stage(), 2)
    ends.stage()
    assert ends.commit(2)[0].outcome == "missing"


def test_source_that_was_started_again():
    """A source rank that listens elsewhere since its restart is read there, not over the connection to the old one."""
    source, target = Worker({"a": np.ones(4)}), Worker({"a": np.zeros(4)})
    ends = Ends([source], [target], nodes=("a", "b"), transport="tcp")
    ends.send(1)
    ends.restart("source", 0)
    source.tensors["a"] += 1
    ends.send(2)
    assert target.tensors["a"].tolist() == [2] * 4
    ends.close()


def test_kept_connection_that_is_gone():
    """A kept connection that was closed meanwhile is made once more; a content may be small or large."""
    segments, reader, secret, taken = Segments(), Reader(), b"s" * 32, []
    content = os.urandom(3 * BATCH + 1)
    segments.begin("key", len(content))[:] = content
    *_, token, generation = segments.end("key")

    def take(number, connection):
        taken.append(connection)
        serve(connection, segments)

    listening = listen("127.0.0.1")
    listener, address = Listener(listening, secret, take), listening.getsockname()
    for number, length in ((1, 3), (2, len(content))):
        place = bytearray(length)
        reader.read({0: [Wish(address, secret, token, generation, [memoryview(place)])]}, time.monotonic() + 30)
        assert (bytes(place), len(taken)) == (content[:length], number)
        shut(taken[-1])
    listener.close()
    with pytest.raises(Unread, match="does not listen"):
        reader.read({0: [Wish(address, secret, token, generation, [memoryview(place)])]}, time.monotonic() + 30)
    segments.close()


def test_reader_that_is_closed_while_it_connects(monkeypatch):
    """A connection that is made meanwhile is closed, and nothing is read by it."""
    listening, reader, connect = listen("127.0.0.1"), Reader(), socket.create_connection

    def connect_late(*args):
        reader.close()
        return connect(*args)

    monkeypatch.setattr(socket, "create_connection", connect_late)
    wish = Wish(listening.getsockname(), b"s" * 32, b"t" * 16, 1, [memoryview(bytearray(3))])
    with leave_nothing(), pytest.raises(Unread, match="The transfer has ended"):
        reader.read({0: [wish]}, time.monotonic() + 10)
    listening.close()


def test_larger_segment_is_a_new_file():
    """A segment never shrinks or grows: readers of the old one keep what they have mapped."""
    source, target = Worker({"a": np.ones(4)}), Worker({"a": np.zeros(4)})
    ends = Ends([source], [target])
    ends.send(1)
    source.tensors, target.tensors = {"a": np.ones(4000)}, {"a": np.zeros(4000)}
    ends.send(2)
    assert target.tensors["a"].all()
    source.tensors, target.tensors = {"a": np.ones(3)}, {"a": np.zeros(3)}
    ends.send(3)
    assert target.tensors["a"].all()


def test_memory_of_ranks_that_have_left_is_unmapped():
    """When another rank sends what a rank had sent, nobody keeps the memory of the one that sends no more."""
    whole, target = np.arange(4.0), np.zeros(4)
    sources = [Worker({"w": LocalTensor(part, (4,), (2 * rank,))}) for rank, part in enumerate(np.split(whole, 2))]
    ends = Ends(sources, [Worker({"w": target})])
    before = count_segments()
    ends.send(0)
    assert count_segments() == before + 4  # two of sources, which the target maps
    sources[0].tensors, sources[1].tensors = {"w": whole + 1}, {}
    ends.send(1)
    assert count_segments() == before + 2
    assert np.array_equal(target, whole + 1)


def count_segments():
    """Return how often this process maps a segment."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:fairlead-transfer")


def test_unused_memory_is_given_back():
    """A smaller plan gives back the memory that it does not use, and another transport all of it."""

    def shared_bytes():
        """Return the bytes of the segments that this process has open; a map has the file open too."""
        gc.collect()
        return sum(os.fstat(descriptor).st_size for descriptor, name in open_files().items() if NAME in name)

    source, target = Worker({"w": np.ones(1 << 17)}), Worker({"w": np.zeros(1 << 17)})
    ends = Ends([source], [target])
    before, mapped_before = shared_bytes(), count_segments()
    ends.send(1)
    assert shared_bytes() - before > 1 << 20
    source.tensors, target.tensors = {"w": np.ones(1 << 10)}, {"w": np.zeros(1 << 10)}
    ends.send(2)
    assert shared_bytes() - before < 1 << 16
    assert count_segments() == mapped_before + 2  # of the source, and of the target
    ends.transport = "object_store"
    ends.plan()
    # Tasks that stage nothing yet.
    ends.ask("source", 0, "describe", ends.epoch, "weights", 0, ends.tasks.source[0], 0, False, False)
    assert count_segments() == mapped_before + 1
    gone = concurrent.futures.Future()
    gone.set_exception(ray.exceptions.RayError("it is gone"))
    staged = {0: Described(channels=[("object_store", types.SimpleNamespace(future=lambda: gone))])}
    (reply,) = ends.fetch(staged, 3)
    assert (reply.outcome, reply.source, reply.reason) == ("lost", 0, "it is gone")
    assert shared_bytes() == before


def test_platform_without_anonymous_files(monkeypatch):
    """Where Python has no `memfd_create`, as on macOS, the reply says why this process cannot share memory."""
    monkeypatch.delattr(os, "memfd_create")
    ends = Ends([Worker({"w": np.ones(3)})], [Worker({"w": np.zeros(3)})])
    ends.plan()
    with pytest.raises(RuntimeError, match=r"memfd_create.*give the link transport='object_store'"):
        ends.stage()


def test_memory_that_cannot_be_opened_is_reported():
    """If the memory of a source cannot be opened, the target says why, so that another transport is taken."""
    ends = Ends([Worker({"a": np.ones(4)})], [Worker({"a": np.zeros(4)})])
    ends.plan()
    staged = ends.stage()
    ((kind, description),) = staged[0].channels
    staged[0] = staged[0]._replace(channels=[(kind, (2**22 + 1, *description[1:]))])
    (reply,) = ends.fetch(staged, 1)
    assert (kind, reply.outcome, reply.source) == ("shared_memory", "lost", 0)
    assert "FileNotFoundError" in reply.reason
    assert "give the link transport='object_store'" in reply.reason


def test_segment_that_cannot_be_made(monkeypatch):
    """A segment for which there is no memory leaves no open file."""

    def fail(*args, **options):
        raise OSError("no memory")

    with leave_nothing(), monkeypatch.context() as patch:
        patch.setattr(segment.mmap, "mmap", fail)
        with pytest.raises(OSError, match="no memory"):
            Segment(4096)


def test_value_that_comes_at_the_deadline():
    """A value that arrives between the end of the wait and the look at it is returned."""

    class Arriving(concurrent.futures.Future):
        def result(self, timeout=None):
            try:
                return super().result(timeout)
            except TimeoutError:
                self.set_result("value")
                raise

    assert fetch_value(types.SimpleNamespace(future=Arriving), 0.0) == "value"
