# SPDX-License-Identifier: Apache-2.0
"""A worker's end of a lane: it receives calls as messages, runs them and sends the answers. Shipped by value.

Messages are numbered. They are kept until the other side acknowledges them, and sent again after a reconnect, so a call
runs once.
"""

import inspect
import pickle
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import ray

from fairlead_workergroup.spi import borrow, dump, dump_error

from .links import DriverLostError, LaneConfig, connect

# The content of a message follows its header in the same frame, because each frame costs time, and the header says
# whether frames follow, because asking the socket costs as much as receiving one.
# Kind, whether frames follow, number of the message, number of the last message received, task.
REQUEST = "<BBQQ24s"
REQUEST_BYTES = struct.calcsize(REQUEST)
CALL, STOP, CANCEL, ACK, WELCOME = range(5)
# Kind, whether frames follow, form, number of the message, number of the last message received, number of the call.
ANSWER = "<BBBQQQ"
ANSWER_BYTES = struct.calcsize(ANSWER)
# BEGUN: a worker that overlaps has begun all calls before STOP.
HELLO, VALUE, ERROR, ITEM, END, BYE, BEGUN = range(7)
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
# How long nothing may arrive before a worker says again what it has received.
QUIET_S = 1.0
# How often a worker connects by the Unix socket, if the driver closes each connection before it has said anything.
LOCAL_TRIES = 3
NO_TASK = bytes(24)


class Answer(NamedTuple):
    """An answer on its way: either frames, or a value to store."""

    form: int
    frames: Sequence[bytes] = ()
    stored: Any = None


NOTHING = Answer(INLINE, (pickle.dumps(None, 5),))


def make_answer(value: Any) -> Answer:
    return NOTHING if value is None else _choose_form(value, dump(value))


def _choose_form(value: Any, frames: Sequence[Any] | None) -> Answer:
    if frames is None:
        return Answer(STORED_REFERENCES, stored=value)
    if sum(map(len, frames)) > INLINE_BYTES:
        return Answer(STORED, stored=value)
    # Copies: the method may change its array before the message is sent again.
    return Answer(INLINE, [bytes(frame) for frame in frames])


def make_error(name: str, error: BaseException) -> Answer:
    """Return the answer for an exception of a method, in the form in which Ray reports it."""
    # Where Ray does not run, asking for the address would start it.
    address = ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"
    shown, frames = dump_error(name, error, package="fairlead_lane", address=address)
    return _choose_form((shown,), frames)


def load_request(frames: Sequence[bytes]) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the name of the host's method, and its positional and keyword arguments, fetched from the object store."""
    name, args, kwargs, refs = read_request(frames)
    if refs:
        fill(args, kwargs, zip(refs, ray.get(list(refs.values())), strict=True))
    return name, args, kwargs


def read_request(frames: Sequence[bytes]) -> tuple[str, list[Any], dict[str, Any], dict[int | str, Any]]:
    """Return the host's method and its arguments; a second frame has answers, and references to fetch."""
    name, args, kwargs = pickle.loads(frames[0])
    refs: dict[int | str, Any] = {}
    if len(frames) > 1:
        fills = pickle.loads(frames[1])
        refs = {key: borrow(*source) for key, source in fills if isinstance(source, tuple)}
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


class Connection:
    """The numbered messages between a worker and the driver."""

    # Whether the driver has said anything.
    is_welcome: bool = False

    def __init__(self, config: LaneConfig, *, waits: bool = True) -> None:
        self._config = config
        self._waits = waits
        self._tries = 1
        self._link = connect(config, waits=waits)
        self._calls: deque[tuple[int, int, bytes, list[bytes]]] = deque()
        self._sent = 0
        self._received = 0
        self._unacked: deque[tuple[int, list[bytes]]] = deque()
        self._heard_at = time.monotonic()

    def close(self) -> None:
        self._link.close()

    def files(self) -> list[int]:
        return self._link.files()

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
        """Wait for the next message; return its kind, its number, its task and its frames."""
        while not self._calls:
            self.look(waits=True)
        return self._calls.popleft()

    def send(self, kind: int, form: int, call: int, frames: Sequence[bytes] = ()) -> None:
        """Send a message, and keep it until it is acknowledged."""
        self._sent += 1
        header = struct.pack(ANSWER, kind, len(frames) > 1, form, self._sent, self._received, call)
        message = [header + frames[0], *frames[1:]] if frames else [header]
        self._unacked.append((self._sent, message))
        self._link.send(message)

    def wait_acknowledged(self, most: int = 0, within_s: float | None = None) -> None:
        """Wait until at most so many messages are not acknowledged, or until the time has passed."""
        ended = None if within_s is None else time.monotonic() + within_s
        while len(self._unacked) > most and (ended is None or time.monotonic() < ended):
            self.look(waits=True)

    def say_goodbye(self) -> None:
        """Tell the driver that no answer follows."""
        self.send(BYE, INLINE, 0)

    def look(self, *, waits: bool = False) -> bool:
        """Accept a message, perhaps after a short wait; return whether one has arrived."""
        link = self._link
        try:
            message = None if link.is_new else link.receive(waits=waits)
            if link.is_new:
                link.is_new = False
                self._greet()
        except DriverLostError:
            if self.is_welcome:
                raise
            # A driver that is short of connections, or that runs as another user, has closed it.
            link.close()
            config = self._config if self._tries < LOCAL_TRIES else self._config._replace(local_address="")
            self._tries += 1
            self._link = connect(config, waits=self._waits)
            return False
        if message is not None:
            self._accept(*message)
            return True
        now = time.monotonic()
        if link.lost_at is not None and now - link.lost_at > ORPHANED_S:
            raise DriverLostError(f"the driver of the lane has not been reachable for {ORPHANED_S:g} s")
        if waits and link.lost_at is None and now - self._heard_at > QUIET_S:
            self._greet()
        return False

    def _greet(self) -> None:
        """Say what has been received, so that both sides agree on what has arrived."""
        self._heard_at = time.monotonic()
        self._link.send([struct.pack(ANSWER, HELLO, False, INLINE, 0, self._received, 0)])

    def _accept(self, first: bytes, *others: bytes) -> None:
        kind, _, number, acked, task = struct.unpack_from(REQUEST, first)
        self.is_welcome = True
        self._heard_at = time.monotonic()
        while self._unacked and self._unacked[0][0] <= acked:
            self._unacked.popleft()
        if kind == WELCOME:
            for _, kept in self._unacked:
                self._link.send(kept)
        elif kind != ACK and number == self._received + 1:
            self._received = number
            self._calls.append((kind, number, task, [first[REQUEST_BYTES:], *others]))


def serve(
    config: LaneConfig,
    find: Callable[[str], Callable[..., Any]],
    name_task: Callable[[Callable[[], bytes] | None], None],
) -> Iterator[Any]:
    """Run the calls of a lane in order until the driver stops it; yield the answers that travel through Ray."""
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
