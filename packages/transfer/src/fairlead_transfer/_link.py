# SPDX-License-Identifier: Apache-2.0
"""`Link`: tensors of one group of workers go to another one, version by version."""

import contextlib
import functools
import itertools
import math
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, get_args

from fairlead_placement.extension import release_when_dropped
from fairlead_workergroup import RayWorkerGroup
from fairlead_workergroup.extension import Site

from ._attempt import Attempt
from ._descriptions import make_selection
from ._report import TransferExplanation, TransferReport
from ._routes import Router, Transport
from ._side import Side, States
from ._tasks import CommitOptions
from .exceptions import StaleWeightsError, State, TransferError

CheckReplicas = Literal["first", "always", "never"]


class Link:
    """Sends the tensors of one group of workers to another group, which may shard them differently.

    After a `send`, all target ranks hold the new version. If it fails before its decision, all of them still hold the
    previous one. From one send to the next, a link holds one copy of the sent pieces in the shared memory of each
    source process, and one on each node that reads them over TCP; or one in Ray's object store.

    Args:
        source_group: the group that has the tensors.
        target_group: the group that gets them; may be the same group.
        source: the name of a method of the source workers that returns a dict from name to local tensor: numpy arrays
            and torch tensors, which each rank holds as a whole, DTensors, or `LocalTensor` objects.
        target: the name of a method of the target workers that returns such a dict. Its tensors are overwritten in
            place.
        apply: instead of `target`, a method of the target workers that takes whole tensors, `{name: tensor}`,
            in several calls.
        chunk_bytes: the most bytes of tensors in one call of `apply`; a larger tensor is a call by itself.
        rename: the names in the target by the names in the source, or a function; other names stay. A `send` refuses a
            name that the source lacks before it moves anything.
        dtype: the dtype in which floating-point tensors travel, such as "bfloat16"; None for that of the source.
        exclude: names or patterns (`"*.inv_freq"`) that are left out on both sides. A `send` refuses one that no tensor
            of either side has.
        transport: "auto" takes shared memory between ranks of one node, and TCP between nodes: one target rank of a
            node reads for all of it, and source ranks listen on the address of their node. "object_store" takes Ray's
            object store for all ranks, if no port can be opened.
        check_replicas: when source ranks that hold the same box compare digests (crc32) of it: at the "first" transfer
            after a worker or a layout has changed, "always" or "never".
        before_commit: a method of the target workers without arguments that runs before the tensors are overwritten.
            On asyncio workers it is called while other methods run, and the commit waits for their end.
        pauses: whether `before_commit` makes the worker quiet, so that the commit does not wait for the methods that
            run: an engine that keeps its requests open, and touches no tensors until `after_commit`.
        after_commit: a method of the target workers without arguments that runs after the tensors are overwritten.

    Raises:
        TypeError, ValueError, AttributeError: a bad argument, or a method that does not exist; nothing has been sent.
    """

    def __init__(
        self,
        source_group: RayWorkerGroup,
        target_group: RayWorkerGroup,
        /,
        *,
        source: str,
        target: str | None = None,
        apply: str | None = None,
        chunk_bytes: int = 1 << 30,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
        dtype: str | None = None,
        exclude: Iterable[str] = (),
        transport: Transport = "auto",
        check_replicas: CheckReplicas = "first",
        before_commit: str | None = None,
        pauses: bool = False,
        after_commit: str | None = None,
    ) -> None:
        if (target is None) == (apply is None):
            raise ValueError(f"give either target= or apply=, got target={target!r} and apply={apply!r}")
        choices = ("transport", transport, Transport), ("check_replicas", check_replicas, CheckReplicas)
        for name, value, kind in choices:
            if value not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}")
        if pauses and before_commit is None:
            raise ValueError("pauses=True needs before_commit=, the method that makes the worker quiet")
        if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes < 1:
            raise ValueError(f"chunk_bytes must be a whole number of at least 1, got {chunk_bytes!r}")
        selection = make_selection(rename, dtype, exclude)
        # Each raises AttributeError if there is no such method.
        source_group.at().explain(source)
        for method, args in ((target, ()), (apply, ({},)), (before_commit, ()), (after_commit, ())):
            if method is not None:
                target_group.at().explain(method, *args)
        self._id = uuid.uuid4().hex
        self._source = Side("source", source_group, self._id, source)
        self._target = Side("target", target_group, self._id, target)
        self._router = Router(self._source, self._target, selection, transport)
        self._states = States(self._target)
        first, before = (None, before_commit) if pauses else (before_commit, None)
        self._commit = CommitOptions(first, before, after_commit, apply, chunk_bytes)
        self._attempt = functools.partial(  # of a source, to bring a version to the target by a deadline
            Attempt,
            target=self._target,
            router=self._router,
            states=self._states,
            next_epoch=itertools.count(1).__next__,
            check_replicas=check_replicas,
        )
        self._version: int | None = None
        self._last: Attempt | None = None
        self._closed = False
        self._guards: list[Callable[[], None]] = []
        self._lock = threading.RLock()  # a signal handler may close the link
        sides = self._source, self._target
        release_when_dropped(self, functools.partial(_describe_leak, *sides), functools.partial(_release, *sides))

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"version {self._version}"
        return f"Link({self._source.group.name_prefix!r} -> {self._target.group.name_prefix!r}, {state})"

    @property
    def version(self) -> int | None:
        """The last version that was decided; None if there is none yet."""
        return self._version

    def send(self, version: int, timeout: float = 600.0, *, again: bool = False) -> TransferReport:
        """Bring the tensors that the source workers hold now to all target workers.

        All targets stage the tensors first. Then this process decides. A failure before the decision leaves
        all targets as they were. After it the direction is forward only: a rank that did not confirm is brought forward
        by the next `send`, or by `sync`. If a source rank is dead whose tensors other source ranks hold, these send
        them; the plan is changed for that once.

        Args:
            version: a number that is larger than the last one.
            timeout: seconds for all of it.
            again: allow a version that is not larger.

        Returns:
            A report of the transfer.

        Raises:
            TypeError, ValueError: a bad argument, a version that is not larger, or a link that has been closed.
            LayoutMismatchError: the tensors do not fit, replicas of the source differ, or tensors of the target cannot
                be written, as those that share memory; nothing has been applied.
            TransferError: a rank is dead or late, or a method of a worker has failed; says which rank, in which phase.
            WorkerGroupError: a group has been shut down.
        """
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise ValueError(f"version must be a whole number of at least 0, got {version!r}")
        with self._turn(timeout, version) as deadline:
            if not again and self._version is not None and version <= self._version:
                raise ValueError(
                    f"version {version} is not larger than the last one, {self._version}; pass again=True to send it"
                )
            began = time.monotonic()
            attempt = self._attempt(self._source, version=version, deadline=deadline)
            ranks = attempt.move_all()
            # The decision: from here on there is no way back.
            self._version, self._last = version, attempt
            attempt.commit(ranks, self._commit)
            return attempt.report(time.monotonic() - began)

    def sync(self, ranks: Iterable[int] | None = None, timeout: float = 600.0) -> TransferReport | None:
        """Bring target ranks to the last version: those that were late or inconsistent, or have been restarted.

        The tensors come from what the source workers have kept of this version, or from target ranks that hold it. The
        other ranks are not disturbed.

        Args:
            ranks: which ranks; None for those that do not hold the last version.
            timeout: seconds for all of it.

        Returns:
            A report of the transfer; None if there was nothing to do.

        Raises:
            TypeError, ValueError: a rank that does not exist, nothing was sent yet, or a link that has been closed.
            LayoutMismatchError: target ranks that hold the same box of the version differ; nothing has been applied.
            TransferError: a rank is dead or late, or no rank holds this version of some tensors any more.
            WorkerGroupError: a group has been shut down.
        """
        if self._version is None:
            raise ValueError(f"{self!r}: nothing has been sent yet; call send first")
        # The version is read in the turn: another thread may send until then.
        with self._turn(timeout, self._version) as deadline:
            version, began = self._version, time.monotonic()
            states = self._states.read()
            chosen = {rank for rank, state in states.items() if state != version} if ranks is None else set(ranks)
            if wrong := sorted(chosen - set(states)):
                raise ValueError(f"ranks {wrong} do not exist: the target group has ranks 0 to {len(states) - 1}")
            if not chosen:
                return None
            attempt = self._attempt(self._source, version=version, deadline=deadline)
            if attempt.fetch_again(chosen, self._last):
                attempt.commit(chosen, self._commit)
                return attempt.report(time.monotonic() - began)
            good = {rank for rank, state in self._states.read().items() if state == version} - chosen
            replicas = Side("replica", self._target.group, self._id, self._target.method)
            attempt = self._attempt(replicas, version=version, deadline=deadline)
            try:
                attempt.move_from_replicas(chosen, good)
                attempt.commit(chosen, self._commit)
            finally:
                replicas.close()
            return attempt.report(time.monotonic() - began)

    def versions(self) -> dict[int, State]:
        """Return what each target rank holds, without a request to it.

        Returns:
            By rank: the version that this link has put there. None if it has put none, as after a restart.
            "inconsistent" if some tensors are of another version than others, and "committing" if the rank has not
            confirmed a decided version.

        Raises:
            WorkerGroupError: the target group has been shut down.
        """
        return self._states.read()

    def guard(self, *methods: str) -> Callable[[], None]:
        """Refuse calls of the target group whose ranks do not all hold the last version, until `close`.

        A rank holds none before the first `send`, after a restart, and when it has joined or has moved to another
        process; `sync` brings it up. While a version is put into place, calls are refused too. Each call that passes is
        sent before that to all ranks, or after it; Ray may deliver it late to workers whose async methods overlap.
        Calls that other processes make are not refused, and a call with `retries` is repeated on what its lost ranks
        hold then.

        Args:
            methods: the methods that need the weights; none given stands for all of the group.

        Returns:
            The function that ends it earlier.

        Raises:
            AttributeError: the target group has no such method.
            ValueError: the link has been closed.
        """
        if self._closed:
            raise ValueError(f"{self!r} has been closed; make a new link")
        for method in methods:
            with contextlib.suppress(TypeError):  # it takes arguments
                self._target.group.at().explain(method)
        check = functools.partial(_check_versions, weakref.ref(self), methods)
        end = Site(self._target.group).check_calls(check)
        self._guards.append(end)
        return end

    def explain(self, timeout: float = 600.0) -> TransferExplanation:
        """Return how the tensors travel: who sends what to whom, by which transport, and the bytes.

        The workers describe their tensors; nothing is staged or moved.

        Raises:
            LayoutMismatchError, TransferError, WorkerGroupError: as for `send`.
        """
        with self._turn(timeout, self._version or 0) as deadline:
            attempt = self._attempt(self._source, version=self._version or 0, deadline=deadline)
            route = attempt.describe()
            return TransferExplanation(route.plan, route.tasks.transports)

    def close(self) -> None:
        """Drop everything that the link holds in the workers. Can be repeated; workers that are gone do not matter.

        It waits until a transfer of another thread has ended, whose timeout limits the wait. A link that is dropped
        without it is closed in the background, with a ResourceWarning.
        """
        with self._lock:
            if self._closed:
                return
            self._closed, self._last = True, None
            for end_guard in self._guards:
                end_guard()
            _release(self._source, self._target)

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _turn(self, timeout: float, version: int) -> Iterator[float]:
        """Keep other threads from using the link; the value is the deadline."""
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=timeout):
            text = f"Another thread uses the link, for all of the {timeout:g} s; wait for it, or give more time."
            raise TransferError("collect", version, (), self._states.read(), text)
        try:
            if self._closed:
                raise ValueError(f"{self!r} has been closed; make a new link")
            yield deadline
        finally:
            self._lock.release()


def _check_versions(
    reference: "weakref.ref[Link]", methods: Collection[str], method: str, ranks: Sequence[int]
) -> None:
    """Refuse a call of ranks that do not hold the last version of a link."""
    link = reference()
    if link is None or (methods and method not in methods):
        return
    held, needed = link.versions(), link.version
    stale = {rank: held.get(rank) for rank in ranks if needed is None or held.get(rank) != needed}
    if stale or needed is None:
        raise StaleWeightsError(method, needed, stale)


def _describe_leak(source: Side, target: Side) -> str:
    """Return the warning for a link that is dropped while workers hold something for it; "" if they hold nothing."""
    if not (source.is_used or target.is_used):
        return ""
    return (
        f"The link from {source.group.name_prefix!r} to {target.group.name_prefix!r} was dropped without close(). What "
        "it holds in their workers is released in the background. Use the link in a with statement, or call close()."
    )


def _release(source: Side, target: Side) -> None:
    """Have the workers drop what they hold for a link."""
    if source.is_used or target.is_used:
        for side in (source, target, Side("replica", target.group, target.link, None)):
            side.close()
