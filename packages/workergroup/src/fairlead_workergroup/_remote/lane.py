# SPDX-License-Identifier: Apache-2.0
"""A worker's end of a lane: it receives calls as messages, runs them and sends the answers. Shipped by value.

The messages of each direction are numbered. A message is kept until the other side has acknowledged it, and sent again
after a reconnect; a message whose number is not the next one is dropped. So a call runs once, also if the network
fails.
"""

import contextlib
import importlib
import inspect
import io
import os
import pickle
import struct
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError

# The content of a message follows its header in the same frame, because each frame costs time, and the header says
# whether frames follow, because asking the socket costs as much as receiving one.
# Kind, whether frames follow, number of the message, number of the last message received, task.
REQUEST = "<BBQQ24s"
REQUEST_BYTES = struct.calcsize(REQUEST)
CALL, STOP, CANCEL, ACK, WELCOME = range(5)
# Kind, whether frames follow, form, number of the message, number of the last message received, number of the call.
ANSWER = "<BBBQQQ"
ANSWER_BYTES = struct.calcsize(ANSWER)
HELLO, VALUE, ERROR, ITEM, END, BYE = range(6)
# Of a value: in the message, or stored in the object store, with or without references inside.
INLINE, STORED, STORED_REFERENCES = range(3)
# Larger answers go through the object store.
INLINE_BYTES = 100_000
# The messages that may be under way to the driver.
MOST_UNACKED = 256
# A worker that has lost its driver for so long ends its serve call.
ORPHANED_S = 60.0
# How long the last answers may take to be acknowledged.
LAST_S = 30.0
POLL_MS = 250
# How long nothing may arrive before a worker says again what it has received.
QUIET_S = 1.0
HEARTBEAT_MS, DEAD_LINK_MS, RECONNECT_MS = 5_000, 20_000, 50
# Of ZeroMQ, as numbers: its enumerations make a message take half as long again.
NO_BLOCK, SEND_MORE, RECEIVES_MORE = 1, 2, 13
PLAIN = frozenset({type(None), bool, int, float, str, bytes})
NO_TASK = bytes(24)


class LaneConfig(NamedTuple):
    """Everything that a worker needs to connect.

    Attributes:
        address: the address of the driver's socket.
        identity: the name of this connection.
        server_key: the public key of the driver.
        public_key: the public key of the workers.
        secret_key: the secret key of the workers.
    """

    address: str
    identity: bytes
    server_key: bytes
    public_key: bytes
    secret_key: bytes


class DriverLostError(ConnectionError):
    """The driver of a lane cannot be reached any more."""


class _Pickler(ray.cloudpickle.CloudPickler):  # type: ignore[misc]
    """Pickle a value, with None in place of references and actor handles; `found` says whether there are any.

    It does not stop at the first one, because the rest may be what cannot be pickled.
    """

    found = False

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (ray.ObjectRef, ray.ObjectRefGenerator, ray.actor.ActorHandle)):
            self.found = True
            return type(None), ()
        return super().reducer_override(obj)


def dump(value: Any) -> list[Any] | None:
    """Return a pickled value, with its buffers apart; None if it holds a reference or an actor handle.

    Only Ray may pickle a reference: outside Ray, pickling it keeps its object for the life of the process.

    Raises:
        Exception: the value cannot be pickled.
    """
    if type(value) in PLAIN:
        return [pickle.dumps(value, 5)]
    buffers: list[pickle.PickleBuffer] = []
    with io.BytesIO() as file:
        pickler = _Pickler(file, 5, buffers.append)
        pickler.dump(value)
        return None if pickler.found else [file.getvalue(), *(buffer.raw() for buffer in buffers)]


def has_references(value: Any) -> bool:
    """Return whether a value holds references or actor handles, as far as it can be pickled."""
    if type(value) in PLAIN:
        return False
    with io.BytesIO() as file:
        pickler = _Pickler(file, 5, lambda buffer: None)
        with contextlib.suppress(Exception):  # whoever sends the value reports that it cannot be pickled
            pickler.dump(value)
        return pickler.found


class Answer(NamedTuple):
    """An answer on its way: either frames, or a value to store."""

    form: int
    frames: Sequence[bytes] = ()
    stored: Any = None


NOTHING = Answer(INLINE, (pickle.dumps(None, 5),))


def make_answer(value: Any) -> Answer:
    if value is None:
        return NOTHING
    frames = dump(value)
    if frames is None:
        return Answer(STORED_REFERENCES, stored=value)
    if sum(map(len, frames)) > INLINE_BYTES:
        return Answer(STORED, stored=value)
    # Copies: the method may change its array before the message is sent again.
    return Answer(INLINE, [bytes(frame) for frame in frames])


def make_error(name: str, error: BaseException) -> Answer:
    """Return the answer for an exception of a method, in the form in which Ray reports it."""
    inner = error.__traceback__.tb_next if error.__traceback__ is not None else None
    text = "".join(traceback.format_exception(type(error), error, inner))
    # Where Ray does not run, asking for the address would start it.
    address = ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"
    where = {"pid": os.getpid(), "ip": address}
    try:
        shown = RayTaskError(name, text, error, **where)
        frames = dump(shown)
    except Exception as problem:  # noqa: BLE001  how a class of the user pickles may raise anything
        plain = RayError(f"{type(error).__qualname__} cannot be pickled: {type(problem).__qualname__}: {problem}")
        shown = RayTaskError(name, text, plain, **where)
        frames = dump(shown)
    if frames is None:
        return Answer(STORED_REFERENCES, stored=(shown,))
    if len(frames) > 1 or len(frames[0]) > INLINE_BYTES:
        return Answer(STORED, stored=(shown,))
    return Answer(INLINE, [frames[0], text.encode(errors="replace")])


def load_request(frames: Sequence[bytes]) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the name of the host's method, and its positional and keyword arguments, fetched from the object store."""
    if len(frames) == 1:  # all arguments are in it
        name, args, kwargs = pickle.loads(frames[0])
        return name, args, kwargs
    name, args, kwargs, refs = read_request(frames)
    if refs:
        fill(args, kwargs, zip(refs, ray.get(list(refs.values())), strict=True))
    return name, args, kwargs


def read_request(frames: Sequence[bytes]) -> tuple[str, list[Any], dict[str, Any], dict[int | str, Any]]:
    """Return the name of the host's method, its positional and keyword arguments, and references to fetch for these.

    The second frame, if there is one, has the arguments that do not travel with every request: objects in the object
    store, whose references are returned by their places, and answers of other workers.
    """
    name, args, kwargs = pickle.loads(frames[0])
    refs: dict[int | str, Any] = {}
    if len(frames) > 1:
        fills = pickle.loads(frames[1])
        refs = {key: _borrow(*source) for key, source in fills if isinstance(source, tuple)}
        answers = ((key, pickle.loads(source[0], buffers=source[1:])) for key, source in fills if key not in refs)
        fill(args, kwargs, answers)
    return name, args, kwargs, refs


def fill(args: list[Any], kwargs: dict[str, Any], values: Iterable[tuple[int | str, Any]]) -> None:
    """Put values in their places among the arguments."""
    for key, value in values:
        if isinstance(key, int):
            args[key] = value
        else:
            kwargs[key] = value


def _borrow(binary: bytes, owner: bytes, status: bytes) -> Any:
    """Return a reference to an object of the driver, which keeps the object until this call has ended.

    Ray's own way to hand a reference over, pickling it, would keep the object for the life of the driver.
    """
    own: Any = ray
    ref = own.ObjectRef(binary, owner)
    worker = own._private.worker.global_worker
    worker.core_worker.deserialize_and_register_object_ref(binary, ray.ObjectRef.nil(), owner, status)
    return ref


def make_socket(zmq: Any, context: Any, kind: int, options: dict[int, Any]) -> tuple[Any, Any, Any]:
    """Return a socket with these options, and the functions that receive and send one frame.

    The wrappers of pyzmq around these functions, for features that are not used here, take as long as the functions.
    """
    socket = context.socket(kind)
    for option, value in options.items():
        socket.setsockopt(option, value)
    plain: Any = super(zmq.Socket, socket)
    return socket, plain.recv, plain.send


class Connection:
    """The socket of a worker.

    Args:
        config: how to connect.

    Raises:
        ModuleNotFoundError: this Python has no pyzmq.
    """

    def __init__(self, config: LaneConfig) -> None:
        try:
            zmq: Any = importlib.import_module("zmq")
            monitor: Any = importlib.import_module("zmq.utils.monitor")
        except ImportError as error:
            raise ModuleNotFoundError(
                "a lane needs pyzmq in the Python of the workers, and it is not installed there"
            ) from error
        self._zmq = zmq
        self._read_event = monitor.recv_monitor_message
        self._context = zmq.Context()
        options: dict[int, Any] = {
            zmq.LINGER: 0,
            zmq.SNDHWM: 0,
            zmq.RCVHWM: 0,
            zmq.ROUTING_ID: config.identity,
            zmq.CURVE_SERVERKEY: config.server_key,
            zmq.CURVE_PUBLICKEY: config.public_key,
            zmq.CURVE_SECRETKEY: config.secret_key,
            zmq.IPV6: "[" in config.address,
            zmq.RECONNECT_IVL: RECONNECT_MS,
            zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: DEAD_LINK_MS,
            zmq.RCVTIMEO: POLL_MS,
        }
        self._socket, self._receive_frame, self._send_frame = make_socket(zmq, self._context, zmq.DEALER, options)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._calls: deque[tuple[int, int, bytes, list[bytes]]] = deque()
        self._sent = 0
        self._received = 0
        self._unacked: deque[tuple[int, list[bytes]]] = deque()
        self._lost_at: float | None = time.monotonic()
        self._heard_at = time.monotonic()
        self._socket.connect(config.address)

    def close(self) -> None:
        """Close the socket."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._context.term()

    def files(self) -> list[int]:
        """Return the files that become readable once when something happens."""
        return [self._socket.getsockopt(self._zmq.FD), self._monitor.getsockopt(self._zmq.FD)]

    @property
    def unacknowledged(self) -> int:
        """The number of messages that the driver has not acknowledged."""
        return len(self._unacked)

    @property
    def has_message(self) -> bool:
        """Whether a message waits to be taken."""
        return bool(self._calls)

    def take(self) -> tuple[int, int, bytes, list[bytes]] | None:
        """Return the next message that has arrived; None without one."""
        return self._calls.popleft() if self._calls else None

    def next_message(self) -> tuple[int, int, bytes, list[bytes]]:
        """Wait for the next message; return its kind, its number, its task and its frames.

        Raises:
            DriverLostError: the driver cannot be reached any more.
        """
        while not self._calls:
            if self._lost_at is None:
                self._wait_for_message()
            else:
                self.look(POLL_MS)
        return self._calls.popleft()

    def _wait_for_message(self) -> None:
        """Receive a message, or look at the connection when none has come for a while.

        Waiting for both at the same time would double the time of a message.
        """
        try:
            self._accept(self._receive_frame())
        except self._zmq.Again:
            self.look(0)
            if time.monotonic() - self._heard_at > QUIET_S:
                self._greet()

    def send(self, kind: int, form: int, call: int, frames: Sequence[bytes] = ()) -> None:
        """Send a message, and keep it until it is acknowledged."""
        self._sent += 1
        header = struct.pack(ANSWER, kind, len(frames) > 1, form, self._sent, self._received, call)
        message = [header + frames[0], *frames[1:]] if frames else [header]
        self._unacked.append((self._sent, message))
        self._send(message)

    def _send(self, message: Sequence[bytes]) -> None:
        *others, last = message
        for frame in others:
            self._send_frame(frame, SEND_MORE)
        self._send_frame(last)

    def wait_acknowledged(self, most: int = 0, within_s: float | None = None) -> None:
        """Wait until at most so many messages are not acknowledged, or until the time has passed."""
        ended = None if within_s is None else time.monotonic() + within_s
        while len(self._unacked) > most and (ended is None or time.monotonic() < ended):
            self.look(POLL_MS)

    def say_goodbye(self) -> None:
        """Tell the driver that no answer follows."""
        self.send(BYE, INLINE, 0)

    def look(self, timeout_ms: int) -> bool:
        """Wait for a message, and accept it; return whether one has arrived.

        Raises:
            DriverLostError: the driver cannot be reached any more.
        """
        ready = dict(self._poller.poll(timeout_ms))
        if self._monitor in ready:
            self._read_events()
        if self._lost_at is not None and time.monotonic() - self._lost_at > ORPHANED_S:
            raise DriverLostError(f"the driver of the lane has not been reachable for {ORPHANED_S:g} s")
        if self._socket not in ready:
            if timeout_ms and self._lost_at is None and time.monotonic() - self._heard_at > QUIET_S:
                self._greet()
            return False
        self._accept(self._receive_frame(NO_BLOCK))
        return True

    def _read_events(self) -> None:
        while self._monitor.poll(0):
            event = self._read_event(self._monitor)["event"]
            if event == self._zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._lost_at = None
                self._greet()
            else:
                self._lost_at = self._lost_at or time.monotonic()

    def _greet(self) -> None:
        """Say what has been received, so that both sides agree on what has arrived."""
        self._heard_at = time.monotonic()
        self._send([struct.pack(ANSWER, HELLO, False, INLINE, 0, self._received, 0)])

    def _accept(self, first: bytes) -> None:
        kind, has_more, number, acked, task = struct.unpack_from(REQUEST, first)
        frames = [first[REQUEST_BYTES:]]
        while has_more:
            frames.append(self._receive_frame())
            has_more = self._socket.getsockopt(RECEIVES_MORE)
        self._heard_at = time.monotonic()
        while self._unacked and self._unacked[0][0] <= acked:
            self._unacked.popleft()
        if kind == WELCOME:
            for _, kept in self._unacked:
                self._send(kept)
        elif kind != ACK and number == self._received + 1:
            self._received = number
            self._calls.append((kind, number, task, frames))


def serve(
    config: LaneConfig,
    find: Callable[[str], Callable[..., Any]],
    name_task: Callable[[Callable[[], bytes] | None], None],
) -> Iterator[Any]:
    """Run the calls that arrive by a lane, one after the other, until the driver ends it.

    Args:
        config: how to connect.
        find: returns a method of the host by its name.
        name_task: tells the record how to find out which task runs.

    Yields:
        The answers that the driver gets through the object store.

    Raises:
        ModuleNotFoundError, DriverLostError: as `Connection` does.
    """
    connection = Connection(config)
    task = NO_TASK
    name_task(lambda: task)
    try:
        while True:
            kind, call, task, frames = connection.next_message()
            if kind == STOP:
                break
            if kind != CALL:
                continue
            name = "a request"
            try:
                name, args, kwargs = load_request(frames)
                result = find(name)(*args, **kwargs)
                del args, kwargs
                if inspect.isgenerator(result):
                    for item in result:
                        answer = make_answer(item)
                        connection.wait_acknowledged(MOST_UNACKED)
                        connection.send(ITEM, answer.form, call, answer.frames)
                        if answer.form != INLINE:
                            yield answer.stored
                        del item, answer
                    kind, answer = END, Answer(INLINE)
                else:
                    kind, answer = VALUE, make_answer(result)
            except (SystemExit, GeneratorExit, DriverLostError):
                raise
            except BaseException as error:  # noqa: BLE001  the caller gets it
                kind, answer = ERROR, make_error(name, error)
            result = None
            connection.send(kind, answer.form, call, answer.frames)
            if answer.form != INLINE:
                yield answer.stored
            del answer
        connection.say_goodbye()
        connection.wait_acknowledged(within_s=LAST_S)
    finally:
        name_task(None)
        connection.close()
