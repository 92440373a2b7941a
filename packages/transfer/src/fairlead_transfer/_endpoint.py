# SPDX-License-Identifier: Apache-2.0
"""Endpoints: transfers between processes that are not workers of a group. The adapters carry the messages.

The one that leads collects the descriptions and makes the plan (`plan_endpoints`); the sources `stage`, the targets
`fetch`, and when all have fetched, they `commit`. An error before the first `commit` leaves all targets as they were.
An endpoint opens no socket. It refuses orders that were not made with its own description, and opens nothing that a
source has staged before that source has proved that it belongs to the same transfer.
"""

import hashlib
import hmac
import os
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ._descriptions import make_selection, one_sided, read_side
from ._remote.end import End
from ._remote.entry import find_shared
from ._remote.transport import explain_failure
from ._routes import plan_orders
from .exceptions import LayoutMismatchError, Phase, RankFailure, State, TransferError

Side = Literal["source", "target"]
AGAIN = "Stage the version again."
NO_SHARED_MEMORY = (
    "These processes cannot share memory: run them on one node, in one pid namespace and as one user, or use the "
    "engine of the framework."
)


@dataclass(frozen=True)
class EndpointDescription:
    """The tensors that an endpoint holds, as plain data. Only the one that makes the plan may have it."""

    node: str  # host, user and namespace of process ids: processes that can share memory; also the node in errors
    tensors: tuple[tuple[Any, ...], ...]  # name, library, dtype, item size, global shape, offsets and sizes of each
    token: bytes = field(repr=False)  # a random number that only this endpoint and the plan know


@dataclass(frozen=True)
class EndpointOrders:
    """The part of a plan that one endpoint carries out: plain data, and secret as its description is."""

    side: Side
    rank: int  # the place of the endpoint on its side
    described: tuple[tuple[Any, ...], ...]  # the tensors that the plan was made for
    secret: bytes = field(repr=False)  # a number that all endpoints of the transfer share
    membership: bytes = field(repr=False)  # the proof that the plan was made with the description of this endpoint
    content: Mapping[str, Any] = field(repr=False)  # the pieces


@dataclass(frozen=True)
class StagedPieces:
    """The place of the pieces that a source has staged, as plain data."""

    rank: int  # the source
    version: int  # the version that it has staged
    channels: Sequence[Mapping[str, Any]] = field(repr=False)  # where the pieces are
    proof: bytes = field(repr=False)  # the proof that the source belongs to the transfer


@dataclass(frozen=True)
class EndpointPlan:
    """The orders of each source and of each target of a transfer."""

    sources: tuple[EndpointOrders, ...]
    targets: tuple[EndpointOrders, ...]


def plan_endpoints(sources: Sequence[EndpointDescription], targets: Sequence[EndpointDescription]) -> EndpointPlan:
    """Plan a transfer from the descriptions of its endpoints; the place of each is its rank.

    The same descriptions give the same plan.

    Raises:
        LayoutMismatchError: tensors that do not fit; lists all of them.
        ValueError: the endpoints are on different nodes.
    """
    nodes = [one.node for one in sources], [one.node for one in targets]
    if len(found := sorted({*nodes[0], *nodes[1]})) > 1:
        raise ValueError(f"a transfer by shared memory needs one node, got {found}")
    selection = make_selection(None, None, ())
    held = read_side("source", [one.tensors for one in sources], selection, renamed=True)
    wanted = read_side("target", [one.tensors for one in targets], selection, renamed=False)
    secret = share_secret([*sources, *targets])
    described = repr([one.tensors for one in (*sources, *targets)])
    # It tells the orders of one plan from those of another.
    number = 1 + int.from_bytes(hashlib.sha256(secret + described.encode()).digest()[:7], "big")
    _, orders = plan_orders(number, held, wanted, selection, nodes, lambda source, target: "shared_memory")

    def order(side: Side, rank: int, one: EndpointDescription, content: Mapping[str, Any]) -> EndpointOrders:
        return EndpointOrders(side, rank, one.tensors, secret, prove(one.token, secret), content)

    return EndpointPlan(
        tuple(order("source", rank, one, orders.source[rank]) for rank, one in enumerate(sources)),
        tuple(order("target", rank, one, orders.target[rank]) for rank, one in enumerate(targets)),
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
    """One end of a transfer: a source of tensors, or a target. The methods block.

    Args:
        tensors: the tensors by name, as a method for `Link` returns them.

    Raises:
        ValueError: the tensors are described, staged or fetched after `close`.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
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

    def replace(self, tensors: Mapping[str, Any]) -> None:
        """Hold other tensors from now on. A plan that was made for other boxes or dtypes is refused."""
        self._tensors = tensors

    def describe(self) -> EndpointDescription:
        """Describe the tensors; LayoutMismatchError lists those that cannot be transferred."""
        return EndpointDescription(self._node, self._describe(), self._token)

    def stage(self, orders: EndpointOrders, version: int) -> StagedPieces:
        """Make the pieces that targets need available to them, as they are now. The last staged version is dropped.

        Raises:
            LayoutMismatchError: the tensors are not those of the plan.
            PermissionError: the orders are of another transfer.
            TransferError: this process cannot share memory.
        """
        self._check(orders, "source")
        self._expect(orders, self._describe())
        reply = self._ask("source", None, self._number, *self._give(orders), False, False)
        self._orders = orders
        channels = reply["staged"]["channels"]
        if blocked := [one["blocked"] for one in channels if "blocked" in one]:
            raise self._error(orders, version, "stage", blocked[0], NO_SHARED_MEMORY)
        return StagedPieces(orders.rank, version, channels, _prove_staged(orders, orders.rank, version, channels))

    def fetch(self, orders: EndpointOrders, staged: Iterable[StagedPieces]) -> None:
        """Map the pieces of one version, and hold them until `commit`. The tensors stay as they are.

        Raises:
            LayoutMismatchError: the tensors are not those of the plan.
            PermissionError: the orders, or staged pieces, are of another transfer.
            TransferError: pieces are missing, overwritten or lost.
            ValueError: the pieces are of different versions.
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
        self._refuse("target", reply.get("refused", ()))
        self._expect(orders, tuple(map(tuple, reply["tensors"])))
        replies = {rank: {"staged": {"channels": one.channels}} for rank, one in pieces.items()}
        reply = self._ask("fetch", version, *self._give(orders), replies, 0.0)
        self._orders = orders
        self._refuse("target", reply.get("refused", ()))
        if "blocked" in reply:
            source, (kind, why) = next(iter(reply["blocked"].items()))
            raise self._error(
                orders, version, "move", f"it cannot read from source {source} by {kind}: {why}", NO_SHARED_MEMORY
            )
        if "bytes" not in reply:
            raise self._error(orders, version, "move", explain_failure(reply), AGAIN)
        self._fetched = orders, version

    def commit(self) -> int:
        """Copy what was fetched into the tensors of this target; return the version that they now have.

        Raises:
            TransferError: the source has staged something else since `fetch`, and the tensors are as they were; or
                they have changed their boxes or dtypes. `versions` says whether they are a mixture ("torn").
            ValueError: nothing has been fetched.
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
        """Give back all memory that this endpoint holds for others. It may be called again."""
        if self._end is not None:
            end, self._end = self._end, None
            end.serve(self, "close", ())

    def _read(self) -> Mapping[str, Any]:
        return self._tensors

    def _describe(self) -> tuple[tuple[Any, ...], ...]:
        self._epoch += 1
        reply = self._ask("source", "_read", 0, None, 0, False, False)
        self._refuse("source", reply.get("refused", ()))
        self._number = reply["number"]
        return tuple(map(tuple, reply["tensors"]))

    def _ask(self, operation: str, *args: Any) -> dict[str, Any]:
        if self._end is None:
            raise ValueError("This endpoint has been closed: make another one.")
        # Without an event loop, because a framework may call this on the loop of its worker. Nothing here waits.
        steps = getattr(self._end, f"_{operation}")(self, self._epoch, *args)
        try:
            steps.send(None)
        except StopIteration as done:
            reply: dict[str, Any] = done.value or {}
            return reply
        raise AssertionError(f"{operation} waits")

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
        """Refuse tensors for which the plan was not made."""
        found, planned = ({one[0]: one for one in side} for side in (described, orders.described))
        wrong = [name for name in found.keys() | planned.keys() if found.get(name) != planned.get(name)]
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
