# SPDX-License-Identifier: Apache-2.0
"""Streams of weights in this process: buckets, connections, and what each side raises."""

import asyncio
import pickle
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fairlead_transfer import RankFailure, TransferError
from fairlead_transfer._remote.segment import Segments
from fairlead_transfer._remote.sockets import MOST_UNPROVEN, Gone, Late, Listener, connect, introduce, join, listen
from fairlead_transfer.adapters._buckets import BucketShape, Packer, Unpacker
from fairlead_transfer.adapters._intake import Intake
from fairlead_transfer.adapters._members import make_memberships
from fairlead_transfer.adapters._messages import is_closed, send_all
from fairlead_transfer.adapters._messages import receive as receive_message
from fairlead_transfer.adapters._transfer import Copied, Start, Transfer
from fairlead_transfer.adapters.verl import FairleadCheckpointEngine

from ..engines import digest, leave_nothing, make_weights

torch = pytest.importorskip("torch")
SECRET = b"s" * 32


@pytest.fixture(autouse=True)
def nothing_left():
    """Check that engines that were finalized or have failed leave nothing."""
    with leave_nothing():
        yield


def make_engines(senders, receivers, bucket=4096, timeout=10.0, nodes=None, dtype=None):
    """Return engines that have joined a transfer.

    With `nodes`, the engines believe that they are on different hosts, and cannot share memory.
    """
    engines = [FairleadCheckpointEngine(bucket, rank == 0, timeout, dtype) for rank in range(senders + receivers)]
    metadata = [engine.prepare() for engine in engines]
    for member, node in zip(metadata, nodes or (), strict=nodes is not None):
        member["node"] = node
    sides = FairleadCheckpointEngine.build_topology(senders, receivers, metadata)
    for one, place in zip(engines, [place for side in sides for place in side["membership"]], strict=True):
        one.init_process_group(pickle.loads(pickle.dumps(place)))
    return engines


async def receive(engine):
    return [(name, digest(tensor)) async for name, tensor in engine.receive_weights(5)]


async def run_all(*coroutines):
    return await asyncio.gather(*coroutines, return_exceptions=True)


@pytest.mark.parametrize("nodes", [None, "abbba", "abcca", "aaaab"])
@pytest.mark.parametrize(("senders", "receivers", "bucket"), [(1, 1, 64), (2, 3, 4096), (3, 1, 1000), (2, 2, 1 << 24)])
def test_buckets(senders, receivers, bucket, nodes):
    """Every tensor arrives bit for bit, for any number of processes and size of a bucket, within and between hosts."""
    engines = make_engines(senders, receivers, bucket, nodes=nodes and nodes[: senders + receivers])
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

    def make():
        return torch.frombuffer(unpacker.make(), dtype=torch.uint8)

    first = make()
    address, tensor = first.data_ptr(), first[3:5]
    del first
    second = make()
    assert second.data_ptr() != address
    del tensor
    assert make().data_ptr() == address


def test_shapes():
    """A bucket fits into its bytes, senders hold equal shares, and only the bytes that are filled travel."""
    shape = BucketShape.fit(10 << 20, 3)
    mib = 1 << 20
    assert (shape.stripe, shape.rows, shape.capacity, shape.share) == (mib, 3, 9 * mib, 3 * mib)
    assert shape.find_stripes(1, 9 * mib) == [(mib, mib), (4 * mib, mib), (7 * mib, mib)]
    assert shape.find_stripes(1, 4 * mib + 5) == [(mib, mib), (4 * mib, 5)]
    assert shape.find_stripes(2, 2 * mib) == []
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
    # Everything connects again: NeMo RL prepares its engines once.
    results = asyncio.run(
        run_all(*(one.send_weights(iter(make_weights(2)), 6) for one in engines[:2]), receive(engines[2]))
    )
    assert results == [None, None, [(name, digest(tensor)) for name, tensor in make_weights(2)]]
    for one in engines:
        one.finalize()
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


def test_leader_that_exits_before_others_connect():
    """A process that cannot connect learns that the first sender has exited long before the deadline."""
    engines = make_engines(1, 1, timeout=30.0)
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


@pytest.mark.parametrize("side", ["source", "target"])
def test_error_of_a_later_bucket(monkeypatch, side):
    """What a process cannot do in a later bucket is its error, with the version, and says that engines have a part."""
    engines = make_engines(2, 1)
    chosen = engines[1 if side == "source" else 2]

    def fail(part, bucket, *args):
        if part in chosen._current and getattr(bucket, "number", bucket) % 2:
            raise OSError("too many open files")
        return done(part, bucket, *args)

    changed, name = (Segments, "end") if side == "source" else (Intake, "read")
    done = getattr(changed, name)
    monkeypatch.setattr(changed, name, fail)
    sent = [one.send_weights(iter(make_weights(1)), 5) for one in engines[:2]]
    results = asyncio.run(run_all(*sent, receive(engines[2])))
    assert str(results[1 if side == "source" else 2]) == "too many open files"
    for error in results[::2] if side == "source" else results[:2]:
        assert isinstance(error, TransferError)
        assert (error.phase, error.version, error.versions) == ("commit", 5, {0: "inconsistent"})
        assert f"{side} rank {int(side == 'source')} on node" in str(error)
        assert "too many open files" in str(error)
    for one in engines:
        one.finalize()


def test_places():
    """Processes that have other buckets are refused; only those listen to which others connect."""
    engines = [FairleadCheckpointEngine(size) for size in (4096, 8192)]
    metadata = [one.prepare() for one in engines]
    with pytest.raises(ValueError, match=r"buckets of \[4096, 8192\] bytes: configure one size"):
        make_memberships(metadata, 1)
    with pytest.raises(ValueError, match="a sender and a receiver, got 2 of 2 that send"):
        make_memberships(metadata, 2)
    for one in engines:
        one.finalize()
    member = {"bucket_bytes": 1, "token": b"t", "address": ("10.0.0.1", 7), "local_address": ("127.0.0.1", 8)}
    for nodes, listening, address in (("aaaa", 1, "127.0.0.1"), ("abbb", 1, "10.0.0.1"), ("aabb", 2, "10.0.0.1")):
        places = make_memberships([{**member, "node": node} for node in nodes], 2)
        assert [place.number for place in places if place.listens] == list(range(listening))
        assert {place.addresses[0][0] for place in places} == {address}
        assert "secret" not in repr(places[0])
    assert make_memberships([{**member, "node": node} for node in "aabbabb"], 2)[0].find_readers() == {
        2: [3, 5, 6],
        4: [],
    }


def test_dtype():
    """With dtype=, floating-point tensors travel in it, and others as they are."""
    engines = make_engines(1, 1, dtype="bfloat16")
    weights = make_weights(1)
    _, received = asyncio.run(run_all(engines[0].send_weights(iter(weights), 5), receive(engines[1])))
    cast = [(name, one.to(torch.bfloat16) if one.is_floating_point() else one) for name, one in weights]
    assert received == [(name, digest(tensor)) for name, tensor in cast]
    with pytest.raises(ValueError, match="dtype must be one of float64, float32,"):
        FairleadCheckpointEngine(4096, dtype="int8")
    for one in engines:
        one.finalize()


def count_sent(sizes, bucket=1 << 16):
    """Return the bytes of float64 tensors of these sizes, and those that their buckets offer to receivers."""
    packer, buckets = Packer(BucketShape.fit(bucket, 1), 0), []
    packer.begin(memoryview(bytearray(bucket)))
    for size in sizes:
        for _ in packer.add("w", torch.zeros(size, dtype=torch.float64)):
            buckets.append(packer.take()[1])
    return 8 * sum(sizes), sum([*buckets, packer.take()[1]])


@pytest.mark.parametrize("size", [4097, 8191, 12000, 1000, 100])
def test_no_padding_travels(size):
    """What travels is hardly more than the tensors, even if only one of them fits in a bucket."""
    length, sent = count_sent([size] * 20)
    assert length <= sent <= 1.05 * length + 64


def test_failure_that_every_process_survives():
    """After a failed transfer the next one works, with no other call: NeMo RL prepares and connects once."""
    engines = make_engines(2, 2, nodes="aabb")
    weights = make_weights(1)

    async def fail(engine):
        async for name, _ in engine.receive_weights(5):
            if name == "layer3":
                raise MemoryError("in the engine")

    for broken in (False, True, False, True, False):
        takes = [fail(engines[2]) if broken else receive(engines[2]), receive(engines[3])]
        sent = [one.send_weights(iter(weights), 5) for one in engines[:2]]
        results = asyncio.run(run_all(*sent, *takes))
        if broken:
            assert isinstance(results.pop(2), MemoryError)
            assert all("target rank 0 on node" in str(error) for error in results), list(map(str, results))
        else:
            assert results == [None, None, *[[(name, digest(tensor)) for name, tensor in weights]] * 2]
    for one in engines:
        one.finalize()


def test_receiver_that_is_a_transfer_behind():
    """A receiver that still waits for the weights of an earlier transfer never gets those of a later one for them."""
    engines = make_engines(1, 2, timeout=30.0)
    old, new = make_weights(1), make_weights(2)
    first = run_all(engines[0].send_weights(iter(old)), receive(engines[1]))
    with pytest.raises(asyncio.TimeoutError):  # the other receiver does not come
        asyncio.run(asyncio.wait_for(first, 0.5))

    async def receive_twice(engine):
        return [*await run_all(receive(engine)), await receive(engine)]

    received = [(name, digest(tensor)) for name, tensor in new]
    sent = engines[0].send_weights(iter(new))
    results = asyncio.run(run_all(sent, receive(engines[1]), receive_twice(engines[2])))
    late = results[2][0]
    assert isinstance(late, TransferError), late
    assert "target rank 1 on node" in str(late)
    assert "it began transfer 1 of its engine, and source rank 0 is at transfer 2" in str(late)
    assert [results[0], results[1], results[2][1]] == [None, received, received]
    for engine in engines:
        engine.finalize()


def test_receiver_that_is_a_transfer_ahead():
    """The transfer that it has given up fails at once, and the next one waits for it."""
    engines = make_engines(1, 2, timeout=30.0)
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(receive(engines[2]), 0.3))

    async def send_twice():
        first, second = (engines[0].send_weights(iter(make_weights(seed))) for seed in (1, 2))
        return [*await run_all(first), await second]

    async def receive_twice():
        return [*await run_all(receive(engines[1])), await receive(engines[1])]

    (failed, sent), (error, first), second = asyncio.run(run_all(send_twice(), receive_twice(), receive(engines[2])))
    assert isinstance(failed, TransferError), failed
    assert "target rank 1 on node" in str(failed)
    assert "it began transfer 2 of its engine, and source rank 0 is at transfer 1" in str(failed)
    assert isinstance(error, TransferError), error
    received = [(name, digest(tensor)) for name, tensor in make_weights(2)]
    assert (sent, first, second) == (None, received, received)
    for engine in engines:
        engine.finalize()


def test_members_that_do_not_read():
    """A message to all reaches those that read, although others do not; it takes one deadline for all."""
    pairs = [socket.socketpair() for _ in range(20)]
    channels = {number: ours for number, (ours, _) in enumerate(pairs)}
    message = b"x" * (8 << 20)  # more than a connection holds
    deadline = time.monotonic() + 60

    def read_all():
        received = [receive_message(theirs, deadline) for _, theirs in pairs[10:]]
        for _, theirs in pairs[:10]:
            theirs.close()
        return received

    async def run():
        return await asyncio.gather(
            asyncio.to_thread(send_all, channels, range(20), message, deadline), asyncio.to_thread(read_all)
        )

    (late, gone), received = asyncio.run(run())
    assert (late, gone.keys(), received) == (set(), set(range(10)), [message] * 10)
    for ours, theirs in pairs:
        ours.close()
        theirs.close()


def test_strangers():
    """Strangers are turned away unread, and hold up no member; a member waits until somebody answers."""
    listening = listen("127.0.0.1")
    address = listening.getsockname()
    with connect(address, time.monotonic() + 5) as early, pytest.raises(Late):
        introduce(early, SECRET, (1, 0), time.monotonic() + 0.2)
    members = []
    listener = Listener(listening, SECRET, lambda caller, connection: members.append((caller, connection)))
    deadline = time.monotonic() + 30
    silent = [socket.create_connection(address, 5) for _ in range(2 * MOST_UNPROVEN)]
    member = connect(address, deadline)
    introduce(member, SECRET, (7, 3), deadline)
    while not members and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [caller for caller, _ in members] == [(7, 3)]
    with socket.create_connection(address, 1) as stranger:
        stranger.sendall(b"x" * 200)
        stranger.settimeout(5)
        assert len(stranger.recv(100)) <= 32  # the question, and no answer
    with connect(address, deadline) as stranger, pytest.raises(Gone):
        introduce(stranger, b"w" * 32, (1, 0), deadline)
    assert len(members) == 1
    listener.close()
    with pytest.raises(Gone, match="does not listen"):
        connect(address, deadline)
    for connection in (*silent, member, members[0][1]):
        connection.close()


def test_no_thread_for_a_member(monkeypatch, eventually):
    """A listener that can start no thread for a moment turns a member away, who comes again (seam: start)."""
    listening, members, refused, start = listen("127.0.0.1"), [], [], threading.Thread.start

    def refuse_first(thread):
        if thread.name == "fairlead-transfer" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_first)
    listener = Listener(listening, SECRET, lambda caller, connection: members.append((caller, connection)))
    try:
        with join(listening.getsockname(), SECRET, (7, 3), time.monotonic() + 10, lambda connection: None):
            assert eventually(lambda: [caller for caller, _ in members] == [(7, 3)])
        assert len(refused) == 1
    finally:
        listener.close()
        for _, connection in members:
            connection.close()


def test_relayed_proof():
    """A stranger that relays a member's connection to the listener at another address learns nothing."""
    listening, relaying, members = listen("127.0.0.1"), listen("127.0.0.1"), []
    listener = Listener(listening, SECRET, lambda caller, connection: members.append(caller))

    def relay():
        connection, _ = relaying.accept()
        with connection, socket.create_connection(listening.getsockname(), 5) as onward:
            connection.settimeout(5)
            connection.sendall(onward.recv(1 << 10))
            onward.sendall(connection.recv(1 << 10))
            connection.sendall(onward.recv(1 << 10))

    with ThreadPoolExecutor(1) as threads, connect(relaying.getsockname(), time.monotonic() + 5) as member:
        relayed = threads.submit(relay)
        with pytest.raises(Gone):
            introduce(member, SECRET, (1, 0), time.monotonic() + 5)
        relayed.result(10)
    assert members == []
    listener.close()
    relaying.close()


def test_many_members_at_a_time():
    """Members that the listener turns away, because many connect before they prove anything, come again."""
    listening, members, count = listen("127.0.0.1"), [], 2 * MOST_UNPROVEN
    address, all_connected = listening.getsockname(), threading.Barrier(count)
    listener = Listener(listening, SECRET, lambda caller, connection: members.append((caller, connection)))

    def join_with_others(number):
        connected = []

        def add(connection):
            connected.append(connection)
            if len(connected) == 1:
                all_connected.wait(30)

        return join(address, SECRET, (number, 0), time.monotonic() + 60, add)

    with leave_nothing(), ThreadPoolExecutor(count) as threads:
        joined = list(threads.map(join_with_others, range(count)))
        deadline = time.monotonic() + 30
        while len(members) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(map(is_closed, joined))
        listener.close()
        assert sorted(number for (number, _), _ in members) == list(range(count))
        for connection in (*joined, *(connection for _, connection in members)):
            connection.close()


def test_finalize_while_a_bucket_is_copied(monkeypatch):
    """A transfer that still runs in another thread opens no memory after its engine was finalized."""
    engines = make_engines(1, 1)
    began, finalized, done = threading.Event(), threading.Event(), Intake.read

    def read(*args):
        began.set()
        assert finalized.wait(30)
        return done(*args)

    monkeypatch.setattr(Intake, "read", read)
    sent = engines[0].send_weights(iter(make_weights(1)), 5)
    with leave_nothing(), ThreadPoolExecutor(1) as threads:
        running = threads.submit(asyncio.run, run_all(sent, receive(engines[1])))
        assert began.wait(30)
        for one in engines:
            one.finalize()
        finalized.set()
        errors = running.result(30)  # which keep what their frames refer to
    assert all(isinstance(error, Exception) for error in errors), errors


def test_error_that_was_sent_before_the_end():
    """A process that cannot send to one that has failed raises the error that this one has sent."""
    member = {
        "bucket_bytes": 1,
        "token": b"t",
        "address": ("10.0.0.1", 7),
        "local_address": ("127.0.0.1", 8),
        "node": "a",
    }
    ours, theirs = socket.socketpair()
    transfer = Transfer(make_memberships([member] * 3, 1)[2], 1, 5, 10.0)
    transfer.connections[0] = ours
    killed = TransferError("move", 5, (RankFailure("target", 0, "a", "it was killed"),), {}, "Send again.")
    for message in (Start(), killed):
        assert send_all({0: theirs}, [0], message, time.monotonic() + 10) == (set(), {})
    theirs.close()
    with pytest.raises(TransferError, match="target rank 0 on node a: it was killed"):
        transfer.tell([0], Copied(0))
    transfer.close()
