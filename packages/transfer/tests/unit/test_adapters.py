# SPDX-License-Identifier: Apache-2.0
"""Streams of weights in this process: buckets, connections, and what each side raises."""

import asyncio
import pickle
import socket
import subprocess
import sys
import time

import pytest

from fairlead_transfer import RankFailure, TransferError
from fairlead_transfer._endpoint import Endpoint
from fairlead_transfer.adapters._buckets import BucketShape, Packer, Unpacker
from fairlead_transfer.adapters._channel import Gone, Late, accept, connect, reserve
from fairlead_transfer.adapters._stream import WeightStream, make_memberships
from fairlead_transfer.adapters.verl import FairleadCheckpointEngine

from ..engines import digest, leave_nothing, make_weights

torch = pytest.importorskip("torch")
SECRET = b"s" * 32


@pytest.fixture(autouse=True)
def nothing_left():
    """Check that engines that were finalized or have failed leave nothing."""
    with leave_nothing():
        yield


def make_engines(senders, receivers, bucket=4096, timeout=10.0, exited=None):
    """Return engines that have joined a transfer; the process of one of them has exited, as the others know it."""
    engines = [FairleadCheckpointEngine(bucket, at == 0, timeout) for at in range(senders + receivers)]
    metadata = [one.prepare() for one in engines]
    if exited is not None:
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            metadata[exited]["pid"] = process.pid
    sides = FairleadCheckpointEngine.build_topology(senders, receivers, metadata)
    for one, place in zip(engines, [place for side in sides for place in side["membership"]], strict=True):
        one.init_process_group(pickle.loads(pickle.dumps(place)))
    return engines


async def receive(engine):
    return [(name, digest(tensor)) async for name, tensor in engine.receive_weights(5)]


async def run_all(*coroutines):
    return await asyncio.gather(*coroutines, return_exceptions=True)


@pytest.mark.parametrize(("senders", "receivers", "bucket"), [(1, 1, 64), (2, 3, 4096), (3, 1, 1000), (2, 2, 1 << 24)])
def test_buckets(senders, receivers, bucket):
    """Every tensor arrives bit for bit, for any number of processes and size of a bucket."""
    engines = make_engines(senders, receivers, bucket)
    weights = make_weights(1, count=14, scale=67)
    sent = [one.send_weights(iter(weights), 5) for one in engines[:senders]]
    results = asyncio.run(run_all(*sent, *map(receive, engines[senders:])))
    assert results[:senders] == [None] * senders
    assert results[senders:] == [[(name, digest(tensor)) for name, tensor in weights]] * receivers
    for one in engines:
        one.finalize()


def test_memory_of_a_bucket_is_used_again():
    """The memory of a bucket is used again as soon as no tensor is in it, and never before."""
    shape = BucketShape.fit(4096, 2)
    unpacker = Unpacker(shape)
    first = unpacker.make(1)
    address, tensor = first.data_ptr(), first.view(-1)[3:5]
    del first
    second = unpacker.make(1)
    assert second.data_ptr() != address
    del tensor
    assert unpacker.make(1).data_ptr() == address


def test_shapes():
    """A bucket fits into its bytes, senders hold equal shares, and a bucket that is not full has fewer rows."""
    shape = BucketShape.fit(10 << 20, 3)
    assert (shape.stripe, shape.rows, shape.capacity) == (1 << 20, 3, 9 << 20)
    assert [shape.count_rows(length) for length in (0, 3 << 20, (3 << 20) + 1, 9 << 20)] == [1, 1, 2, 3]
    with pytest.raises(ValueError, match="A bucket of 100 bytes is too small for 2 senders: give at least 128 bytes"):
        BucketShape.fit(100, 2)
    with pytest.raises(TypeError, match="'w' is a list: yield whole, dense torch tensors"):
        list(Packer(shape, 0).add("w", [1.0]))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ["quantized", "meta", "sparse"])
def test_tensors_without_plain_bytes(kind):
    """They are refused in the process that sends, which they would end or which could not read them."""
    make = {
        "quantized": lambda one: torch.quantize_per_tensor(one, 0.1, 0, torch.qint8),
        "meta": lambda one: one.to("meta"),
        "sparse": torch.Tensor.to_sparse,
    }
    with pytest.raises(TypeError, match="'w' is a Tensor: yield whole, dense torch tensors"):
        list(Packer(BucketShape.fit(4096, 1), 0).add("w", make[kind](torch.rand(4))))


def test_senders_that_differ():
    """Senders with other tensors are an error everywhere, which names the sender and the tensors."""
    engines = make_engines(2, 1)
    other = [(name, tensor) for name, tensor in make_weights(1) if name != "scalar"]
    sent = [engines[0].send_weights(iter(make_weights(1)), 5), engines[1].send_weights(iter(other), 5)]
    for error in asyncio.run(run_all(*sent, receive(engines[2]))):
        assert isinstance(error, TransferError)
        assert "source rank 1 on node" in str(error)
        assert "is not that of source rank 0" in str(error)
        assert (error.phase, error.version) == ("move", 5)


def test_sender_that_fails():
    """An error of the generator is raised in its process, and all others get a TransferError with it."""

    def fail():
        yield from make_weights(1)[:9]
        raise RuntimeError("no weights")

    engines = make_engines(2, 1)
    sent = [engines[0].send_weights(iter(make_weights(1)), 5), engines[1].send_weights(fail(), 5)]
    results = asyncio.run(run_all(*sent, receive(engines[2])))
    assert str(results[1]) == "no weights"
    assert all("source rank 1 on node" in str(one) and "RuntimeError: no weights" in str(one) for one in results[::2])
    with pytest.raises(ValueError, match="This engine takes part in no transfer"):
        asyncio.run(receive(engines[2]))


@pytest.mark.parametrize("failing", [0, 1])
def test_sender_that_fails_before_the_first_bucket(failing):
    """All others learn of it long before the deadline."""

    def fail():
        raise RuntimeError("no weights")
        yield

    engines = make_engines(2, 1, timeout=30.0)
    began = time.monotonic()
    sent = [one.send_weights(fail() if one is engines[failing] else iter(make_weights(1)), 5) for one in engines[:2]]
    results = asyncio.run(run_all(*sent, receive(engines[2])))
    assert str(results.pop(failing)) == "no weights"
    assert all(f"source rank {failing} on node" in str(one) and "no weights" in str(one) for one in results)
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("shorter", [0, 1])
def test_sender_that_lacks_the_last_tensor(shorter):
    """It is an error everywhere, before a receiver has taken what the first sender has for the whole."""
    weights = [(name, torch.zeros(512, dtype=torch.float64)) for name in "ab"]  # each fills a bucket
    engines = make_engines(2, 1)
    sent = [one.send_weights(iter(weights[:1] if one is engines[shorter] else weights), 5) for one in engines[:2]]
    for error in asyncio.run(run_all(*sent, receive(engines[2]))):
        assert isinstance(error, TransferError)
        assert "its bucket 0, of 1 tensors or parts, 'a' to 'a', is not that of source rank 0" in str(error)
        assert "the same names" in str(error)
        assert error.phase == "move"


@pytest.mark.parametrize("late", ["connects", "copies"])
def test_receiver_that_is_late(late):
    """A receiver that does not connect, or does not copy a bucket, is named by the deadline."""
    engines = make_engines(1, 2, timeout=0.5)

    async def wait():
        if late == "copies":
            async for _ in engines[2].receive_weights(5):
                await asyncio.sleep(2.0)
                break

    began = time.monotonic()
    sent = engines[0].send_weights(iter(make_weights(1)), 5)
    results = asyncio.run(run_all(sent, receive(engines[1]), wait()))
    doing = "connect to source rank 0" if late == "connects" else "copy bucket"
    for error in results[:2]:
        assert isinstance(error, TransferError)
        assert f"it did not {doing}" in str(error)
        assert "target rank 1 on node" in str(error)
        assert "longer timeout than 0.5 s" in str(error)
    assert time.monotonic() - began < 5
    for one in engines:
        one.finalize()


def test_receiver_that_exits_before_it_connects():
    """All others learn of it long before the deadline."""
    engines = make_engines(1, 2, timeout=30.0, exited=2)
    began = time.monotonic()
    results = asyncio.run(run_all(engines[0].send_weights(iter(make_weights(1)), 5), receive(engines[1])))
    for error in results:
        assert isinstance(error, TransferError)
        assert "target rank 1 on node" in str(error)
        assert "its process has exited" in str(error)
    assert time.monotonic() - began < 15
    for one in engines:
        one.finalize()


def test_leader_that_exits_before_others_connect():
    """A process that cannot connect learns that the first sender has exited long before the deadline."""
    engines = make_engines(1, 1, timeout=30.0, exited=0)
    engines[0].finalize()
    began = time.monotonic()
    (error,) = asyncio.run(run_all(receive(engines[1])))
    assert isinstance(error, TransferError)
    assert "source rank 0 on node" in str(error)
    assert "its process has exited" in str(error)
    assert time.monotonic() - began < 15


def test_cancelled_before_it_connects():
    """No thread goes on waiting for the first sender when the caller has given up."""
    engines = make_engines(1, 1, timeout=30.0)
    began = time.monotonic()
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(receive(engines[1]), 0.3))
    assert time.monotonic() - began < 10
    engines[0].finalize()


def test_error_after_some_have_the_bucket(monkeypatch):
    """An engine may have loaded a bucket that the next receiver did not get: the error says so."""
    engines = make_engines(1, 2)
    tell = WeightStream._tell

    def fail(self, number, kind, content):
        if (number, kind) == (2, "bucket"):
            raise self._lost([2], Gone("the connection was closed"))
        tell(self, number, kind, content)

    monkeypatch.setattr(WeightStream, "_tell", fail)
    sent = engines[0].send_weights(iter(make_weights(1, count=1)), 5)
    error = asyncio.run(run_all(sent, *map(receive, engines[1:])))[0]
    assert isinstance(error, TransferError)
    assert (error.phase, error.versions) == ("commit", {0: "torn", 1: "torn"})
    for one in engines:  # the first receiver may have all that it wants
        one.finalize()


@pytest.mark.parametrize("side", ["source", "target"])
def test_error_of_the_endpoint(monkeypatch, side):
    """What a process cannot do in a later bucket is its error, with the version, and says that engines have a part."""
    engines = make_engines(2, 1)

    def fail(endpoint, orders, *args, **options):
        seen.append(orders.rank)
        if not orders.rank and seen.count(0) > 1:
            failure = RankFailure(side, orders.rank, "host", "too many open files")
            raise TransferError("move", 2, (failure,), {}, "Plan with transport='object_store'.")
        return done(endpoint, orders, *args, **options)

    name, seen = {"source": "stage", "target": "fetch"}[side], []
    done = getattr(Endpoint, name)
    monkeypatch.setattr(Endpoint, name, fail)
    sent = [one.send_weights(iter(make_weights(1)), 5) for one in engines[:2]]
    for error in asyncio.run(run_all(*sent, receive(engines[2]))):
        assert isinstance(error, TransferError)
        assert (error.phase, error.version, error.versions) == ("commit", 5, {0: "torn"})
        assert f"{side} rank 0 on node" in str(error)
        assert "too many open files" in str(error)
        assert "object_store" not in str(error)


def test_other_hosts():
    """Processes that cannot share memory, or have other buckets, are refused before they connect."""
    engines = [FairleadCheckpointEngine(size) for size in (4096, 8192)]
    metadata = [one.prepare() for one in engines]
    with pytest.raises(ValueError, match=r"buckets of \[4096, 8192\] bytes: configure one size"):
        make_memberships(metadata, 1)
    metadata[1] |= {"bucket_bytes": 4096}
    object.__setattr__(metadata[1]["description"], "node", "another host")
    with pytest.raises(ValueError, match="processes that can share memory, and these are on another host, "):
        make_memberships(metadata, 1)
    with pytest.raises(ValueError, match="a sender and a receiver, got 2 of 2 that send"):
        make_memberships(metadata, 2)
    for one in engines:
        one.finalize()


def test_strangers():
    """A port refuses connections until it is needed; a stranger is turned away unread; a wrong address is noticed."""
    listener = reserve()
    address = listener.getsockname()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, 1).close()
    with pytest.raises(Late):
        connect(address, SECRET, 1, time.monotonic() + 0.2, lambda: False)
    listener.listen(4)
    deadline = time.monotonic() + 10
    with socket.create_connection(address, 1) as stranger:
        stranger.sendall(b"x" * 200)
        assert accept(listener, SECRET, deadline) is None
        stranger.settimeout(5)
        assert len(stranger.recv(100)) <= 32  # the question, and no answer
    results = asyncio.run(
        run_all(
            asyncio.to_thread(connect, address, b"w" * 32, 1, deadline, lambda: False),
            asyncio.to_thread(accept, listener, SECRET, deadline),
        )
    )
    assert isinstance(results[0], Gone)
    assert results[1] is None
    listener.close()
