# SPDX-License-Identifier: Apache-2.0
"""Endpoints: transfers between processes that are not workers of a group. The caller carries the messages."""

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ._descriptions import make_selection, one_sided, read_side
from ._plan import TransferPlan
from ._remote.end import End
from ._remote.entry import find_shared
from ._remote.transport import explain_failure
from ._routes import plan_orders
from .exceptions import LayoutMismatchError, Phase, RankFailure, State, TransferError

Side = Literal["source", "target"]
EndpointTransport = Literal["auto", "shared_memory", "object_store"]


@dataclass(frozen=True)
class EndpointDescription:
    """The tensors that an endpoint holds, as plain data. Send it to whoever makes the plan, and to no one else.

    Attributes:
        node: the processes that can share memory: host, user and namespace. Also the node of this endpoint in errors.
        tensors: name, library, dtype, item size, global shape, offsets and sizes of each tensor.
        token: a random number that only this endpoint and the plan know.
    """

    node: str
    tensors: tuple[tuple[Any, ...], ...]
    token: bytes = field(repr=False)


@dataclass(frozen=True)
class EndpointOrders:
    """The part of a plan that one endpoint carries out. It is plain data, and secret as its description is.

    Attributes:
        side: "source" or "target".
        rank: the place of the endpoint on its side.
        described: the tensors that the plan was made for.
        secret: a number that all endpoints of the transfer share.
        membership: the proof that the plan was made with the description of this endpoint.
        content: the pieces.
    """

    side: Side
    rank: int
    described: tuple[tuple[Any, ...], ...]
    secret: bytes = field(repr=False)
    membership: bytes = field(repr=False)
    content: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True)
class StagedPieces:
    """The place of the pieces that a source has staged: plain data, and a reference where they are in Ray's store.

    Attributes:
        rank: the source.
        version: the version that it has staged.
        channels: where the pieces are.
        proof: the proof that the source belongs to the transfer.
    """

    rank: int
    version: int
    channels: Sequence[Mapping[str, Any]] = field(repr=False)
    proof: bytes = field(repr=False)


@dataclass(frozen=True)
class EndpointPlan:
    """The way of tensors from some endpoints to others.

    Attributes:
        plan: who sends which piece to whom.
        sources: the orders of each source.
        targets: the orders of each target.
        transports: the transport of each pair of a source and a target that exchange pieces.
    """

    plan: TransferPlan
    sources: tuple[EndpointOrders, ...]
    targets: tuple[EndpointOrders, ...]
    transports: Mapping[tuple[int, int], str]


def plan_endpoints(
    sources: Sequence[EndpointDescription],
    targets: Sequence[EndpointDescription],
    *,
    transport: EndpointTransport = "auto",
    rename: Mapping[str, str] | None = None,
    dtype: str | None = None,
    exclude: Sequence[str] = (),
) -> EndpointPlan:
    """Plan a transfer from the descriptions of its endpoints. The same descriptions give the same plan.

    Args:
        sources: the descriptions of the endpoints that send; the place of each is its rank.
        targets: the descriptions of the endpoints that receive.
        transport: "shared_memory" between processes of one node, "object_store" between processes that are connected
            to one Ray cluster, or "auto": the first where a pair shares a node.
        rename: the names in the target by the names in the source; other names stay.
        dtype: the dtype in which floating-point tensors travel, such as "bfloat16".
        exclude: names or patterns that are left out on both sides.

    Returns:
        The plan, with the orders for each endpoint.

    Raises:
        LayoutMismatchError: tensors that do not fit; lists all of them.
        TypeError, ValueError: no source or no target, a dtype or a transport that does not exist, or shared memory for
            endpoints of different nodes.

    >>> import numpy as np
    >>> with Endpoint({"w": np.arange(4.0)}) as trainer, Endpoint({"w": np.zeros(4)}) as engine:
    ...     plan = plan_endpoints([trainer.describe()], [engine.describe()])
    ...     plan.plan.bytes_moved, plan.transports
    (32, {(0, 0): 'shared_memory'})
    """
    if not sources or not targets:
        raise ValueError(f"a plan needs a source and a target, got {len(sources)} sources and {len(targets)} targets")
    if transport not in ("auto", "shared_memory", "object_store"):
        raise ValueError(f"transport must be 'auto', 'shared_memory' or 'object_store', got {transport!r}")
    nodes = [one.node for one in sources], [one.node for one in targets]
    if transport == "shared_memory" and len(found := sorted({*nodes[0], *nodes[1]})) > 1:
        raise ValueError(f"transport='shared_memory' needs one node, got {found}: use transport='auto'")
    selection = make_selection(rename, dtype, exclude)
    held = read_side("source", [one.tensors for one in sources], selection, renamed=True)
    wanted = read_side("target", [one.tensors for one in targets], selection, renamed=False)
    secret = share_secret([*sources, *targets])
    described = repr([one.tensors for one in (*sources, *targets)] + [transport, dtype, rename, exclude])
    # It tells the orders of one plan from those of another.
    number = 1 + int.from_bytes(hashlib.sha256(secret + described.encode()).digest()[:7], "big")

    def choose(source: int, target: int) -> str:
        if transport != "auto":
            return transport
        return "shared_memory" if nodes[0][source] == nodes[1][target] else "object_store"

    plan, orders = plan_orders(number, held, wanted, selection, nodes, choose)

    def order(side: Side, rank: int, one: EndpointDescription, content: Mapping[str, Any]) -> EndpointOrders:
        return EndpointOrders(side, rank, one.tensors, secret, prove(one.token, secret), content)

    return EndpointPlan(
        plan,
        tuple(order("source", rank, one, orders.source[rank]) for rank, one in enumerate(sources)),
        tuple(order("target", rank, one, orders.target[rank]) for rank, one in enumerate(targets)),
        orders.transports,
    )


def share_secret(members: Iterable[EndpointDescription]) -> bytes:
    """Return the number that all endpoints of a transfer share; whoever lacks one description cannot know it."""
    return hashlib.sha256(b"".join(one.token for one in members)).digest()


def prove(secret: bytes, what: bytes) -> bytes:
    """Return the proof that its sender knows a secret."""
    return hmac.new(secret, what, hashlib.sha256).digest()


def find_node() -> str:
    """Return what processes have in common that can share memory: host, user and namespace of process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}:{os.getuid()}:{Path('/proc/self/ns/pid').stat().st_ino}:{boot}"


class Endpoint:
    """One end of a transfer, in any process: a source of tensors, a target, or both.

    The caller carries the messages by an RPC of its own. It collects the descriptions, makes the plan
    (`plan_endpoints`), has the sources `stage`, the targets `fetch`, and when all have fetched, `commit`. An error
    before the first `commit` leaves all targets as they were. An endpoint opens no socket. It refuses orders that were
    not made with its own description. It opens nothing that a source has staged before that source has proved that it
    belongs to the same transfer.

    Args:
        tensors: the tensors by name, as a method for `Link` returns them, or a function that returns them.

    The methods block. In a coroutine, call them by `asyncio.to_thread` to let others run.

    Raises:
        ValueError: the tensors are described, staged or fetched after `close`.

    >>> import numpy as np
    >>> weights, copy = np.arange(6.0), np.zeros(6)
    >>> with Endpoint({"w": weights}) as trainer, Endpoint({"w": copy}) as engine:
    ...     plan = plan_endpoints([trainer.describe()], [engine.describe()])
    ...     staged = trainer.stage(plan.sources[0], version=1)
    ...     engine.fetch(plan.targets[0], [staged], timeout=30)
    ...     engine.commit()
    1
    >>> copy.tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    """

    def __init__(self, tensors: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> None:
        self._tensors = tensors
        self._token = secrets.token_bytes(16)
        self._node = find_node()
        key = self._token.hex(), "endpoint"
        self._end: End | None = End(key)
        find_shared("ends", {})[key] = self._end
        self._epoch = 0
        self._number = 0
        self._orders: EndpointOrders | None = None
        self._fetched: tuple[EndpointOrders, int] | None = None

    def replace(self, tensors: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> None:
        """Hold other tensors from now on. A plan that was made for other boxes or dtypes is refused.

        Args:
            tensors: as for the class.

        >>> import numpy as np
        >>> with Endpoint({}) as endpoint:
        ...     endpoint.replace({"w": np.zeros(2)})
        ...     len(endpoint.describe().tensors)
        1
        """
        self._tensors = tensors

    def describe(self) -> EndpointDescription:
        """Describe the tensors that this endpoint holds.

        Returns:
            The description, which can be pickled.

        Raises:
            LayoutMismatchError: tensors that cannot be transferred; lists all of them.

        >>> import numpy as np
        >>> with Endpoint({"w": np.zeros((2, 3))}) as endpoint:
        ...     endpoint.describe().tensors[0][:5]
        ('w', 'numpy', 'float64', 8, (2, 3))
        """
        with self._keeping_none():
            return EndpointDescription(self._node, self._describe(), self._token)

    def stage(self, orders: EndpointOrders, version: int, *, verify: bool = False) -> StagedPieces:
        """Make the pieces that targets need available to them, as they are now. The last staged version is dropped.

        Args:
            orders: those of this source.
            version: the number of the version.
            verify: whether targets compare digests (crc32).

        Returns:
            The place of the pieces, for all targets.

        Raises:
            LayoutMismatchError: the tensors are not those of the plan.
            PermissionError: the orders are of another transfer.
            TransferError: this process cannot share memory.

        >>> import numpy as np
        >>> with Endpoint({"w": np.zeros(2)}) as trainer, Endpoint({"w": np.zeros(2)}) as engine:
        ...     plan = plan_endpoints([trainer.describe()], [engine.describe()])
        ...     trainer.stage(plan.sources[0], version=7).version
        7
        """
        self._check(orders, "source")
        with self._keeping_none():
            self._expect(orders, self._describe())
            reply = self._ask("source", None, self._number, *self._give(orders), verify, False)
        self._orders = orders
        channels = reply["staged"]["channels"]
        if blocked := [one["blocked"] for one in channels if "blocked" in one]:
            raise self._error(orders, version, "stage", blocked[0], "Plan with transport='object_store'.")
        return StagedPieces(orders.rank, version, channels, _prove_staged(orders, orders.rank, version, channels))

    def fetch(self, orders: EndpointOrders, staged: Iterable[StagedPieces], *, timeout: float = 600.0) -> None:
        """Map or get the pieces of one version, and hold them until `commit`. The tensors stay as they are.

        Args:
            orders: those of this target.
            staged: the pieces that the sources have staged, all of one version.
            timeout: seconds until pieces in Ray's object store must have arrived.

        Raises:
            LayoutMismatchError: the tensors are not those of the plan, or cannot be written, or two of them are in one
                memory and have different values in the source.
            PermissionError: the orders, or staged pieces, are of another transfer.
            TransferError: pieces are missing, late, overwritten or lost, or their digests differ.
            ValueError: the pieces are of different versions.

        >>> import numpy as np
        >>> with Endpoint({"w": np.ones(2)}) as trainer, Endpoint({"w": np.zeros(2)}) as engine:
        ...     plan = plan_endpoints([trainer.describe()], [engine.describe()])
        ...     engine.fetch(plan.targets[0], [trainer.stage(plan.sources[0], version=1)])
        """
        self._check(orders, "target")
        self._fetched = None
        pieces = {one.rank: one for one in staged}
        for one in pieces.values():
            expected = _prove_staged(orders, one.rank, one.version, one.channels)
            if not hmac.compare_digest(expected, one.proof):
                text = "has not proved that it belongs to this transfer; nothing of it was opened"
                raise PermissionError(f"Source {one.rank} {text}. Pass the staged pieces of sources of this plan.")
        versions = sorted({one.version for one in pieces.values()})
        if len(versions) > 1:
            raise ValueError(f"The sources have staged versions {versions}: pass pieces of one version.")
        version = versions[0] if versions else 0
        if missing := sorted(set(orders.content["sources"]).difference(pieces)):
            text = f"it needs pieces of source {missing[0]}, and got those of sources {sorted(pieces)}"
            raise self._error(orders, version, "move", text, "Pass what every source has staged.")
        self._epoch += 1
        reply = self._ask("target", "_read", 0)
        names = orders.content["names"]
        wrong = reply.get("refused", ())
        self._refuse("target", [one for one in wrong if "tensors" not in reply or one[0] in names])
        self._expect(orders, tuple(map(tuple, reply["tensors"])))
        replies = {rank: {"staged": {"channels": one.channels}} for rank, one in pieces.items()}
        verify = all("digests" in channel for one in pieces.values() for channel in one.channels)
        reply = self._ask("fetch", version, *self._give(orders), replies, verify, timeout)
        self._orders = orders
        self._refuse("target", reply.get("refused", ()))
        if "blocked" in reply:
            source, (kind, why) = next(iter(reply["blocked"].items()))
            text = f"it cannot read from source {source} by {kind}: {why}"
            remedy = "Stage the version again; if this happens again, plan with transport='object_store'."
            raise self._error(orders, version, "move", text, remedy)
        if "bytes" not in reply:
            late = f"After {timeout} s: " if "waiting" in reply else ""
            raise self._error(orders, version, "move", late + explain_failure(reply), "Stage the version again.")
        self._fetched = orders, version

    def commit(self) -> int:
        """Copy what was fetched into the tensors of this target.

        Returns:
            The version that the tensors now have.

        Raises:
            TransferError: the source has staged something else since `fetch`, and the tensors are as they were; or
                they have changed their boxes or dtypes. `versions` says whether they are a mixture ("torn").
            ValueError: nothing has been fetched.

        >>> import numpy as np
        >>> with Endpoint({"w": np.ones(2)}) as trainer, Endpoint({"w": np.zeros(2)}) as engine:
        ...     plan = plan_endpoints([trainer.describe()], [engine.describe()])
        ...     engine.fetch(plan.targets[0], [trainer.stage(plan.sources[0], version=3)])
        ...     engine.commit()
        3
        """
        if self._fetched is None:
            raise ValueError("Nothing has been fetched: call fetch() before each commit().")
        orders, version = self._fetched
        self._fetched = None
        reply = self._ask("commit", version, None, None, None, 0)
        if "committed" in reply:
            return version
        gone = "a source has staged again or was closed, or this endpoint has described or staged its tensors since"
        why = reply.get("error", f"what it fetched is gone: {gone}")
        raise self._error(orders, version, "commit", why, "Stage, fetch and commit the version again.")

    def close(self) -> None:
        """Give back all memory that this endpoint holds for others. It may be called again.

        >>> endpoint = Endpoint({})
        >>> endpoint.close()
        """
        if self._end is not None:
            end, self._end = self._end, None
            end.serve(self, "close", ())

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self) -> Mapping[str, Any]:
        return self._tensors() if callable(self._tensors) else self._tensors

    def _describe(self) -> tuple[tuple[Any, ...], ...]:
        self._epoch += 1
        reply = self._ask("source", "_read", 0, None, 0, False, False)
        self._refuse("source", reply.get("refused", ()))
        self._number = reply["number"]
        return tuple(map(tuple, reply["tensors"]))

    @contextlib.contextmanager
    def _keeping_none(self) -> Iterator[None]:
        """Let go of the tensors that were read when the block ends, so that the process can free their memory."""
        try:
            yield
        finally:
            self._ask("release")

    def _ask(self, operation: str, *args: Any) -> dict[str, Any]:
        if self._end is None:
            raise ValueError("This endpoint has been closed: make another one.")
        # Without an event loop, so that Ctrl-C ends a wait, and a framework may call this on the loop of its worker.
        steps = getattr(self._end, f"_{operation}")(self, self._epoch, *args)
        try:
            steps.send(None)
        except StopIteration as done:
            reply: dict[str, Any] = done.value or {}
            return reply
        raise TypeError(f"The function that returns the tensors must not wait in a coroutine: {self._tensors!r}")

    def _give(self, orders: EndpointOrders) -> tuple[Mapping[str, Any] | None, int]:
        """Return the orders as the end takes them: None and their number for those that it has."""
        # What fails below may have given it these or not.
        known, self._orders = self._orders, None
        return None if orders is known else orders.content, orders.content["id"]

    def _check(self, orders: EndpointOrders, side: Side) -> None:
        if orders.side != side or not hmac.compare_digest(prove(self._token, orders.secret), orders.membership):
            text = f"These are the orders of {orders.side} {orders.rank}, which is not this endpoint as a {side}."
            raise PermissionError(f"{text} Pass the orders that plan_endpoints() made from its own description.")

    def _expect(self, orders: EndpointOrders, described: tuple[tuple[Any, ...], ...]) -> None:
        """Refuse tensors for which the plan was not made; those that it leaves out may differ."""
        names = set(orders.content["names"])
        found, planned = ({one[0]: one for one in side} for side in (described, orders.described))
        wrong = [name for name in names & (found.keys() | planned.keys()) if found.get(name) != planned.get(name)]
        self._refuse(orders.side, [(name, "it has changed since the plan was made: plan again") for name in wrong])

    def _refuse(self, side: Side, wrong: Iterable[tuple[str, str]]) -> None:
        host = self._node.partition(":")[0]
        if mismatches := tuple(one_sided(side, name, host, why) for name, why in wrong):
            raise LayoutMismatchError(mismatches)

    def _error(self, orders: EndpointOrders, version: int, phase: Phase, why: str, remedy: str) -> TransferError:
        versions: dict[int, State] = {orders.rank: self._end.held} if phase == "commit" and self._end else {}
        failure = RankFailure(orders.side, orders.rank, self._node, why)
        return TransferError(phase, version, (failure,), versions, remedy)


def _prove_staged(orders: EndpointOrders, rank: int, version: int, channels: Sequence[Mapping[str, Any]]) -> bytes:
    return prove(orders.secret, repr((rank, version, channels)).encode())


def with_tensors(description: EndpointDescription, tensors: Sequence[tuple[Any, ...]]) -> EndpointDescription:
    """Return the description of an endpoint after it has replaced its tensors."""
    return replace(description, tensors=tuple(tensors))
