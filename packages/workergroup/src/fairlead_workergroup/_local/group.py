# SPDX-License-Identifier: Apache-2.0
"""The group: its start, its calls by the code of all groups, and its end."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from ray.util.placement_group import PlacementGroup

from fairlead_placement import RayVirtualCluster, Slot
from fairlead_sharding import NamedSharding

from .._calls.map import MapOptions
from .._calls.plan import Mesh
from .._calls.sender import Order, Request, Sender
from .._calls.view import Target, TypedCalls
from .._group import RayWorkerGroup
from .._launch import check_axes, check_start, launch
from .._membership.facts import WorkerFacts
from .._membership.machine import FixedMembership
from .._membership.model import Place, Started, configure_ask, make_process
from .._membership.roster import Roster
from .._observe.calls import Counters
from .._remote.describe import load
from .._start.builder import ClassLike
from .._start.environment import WorkerEnvironment
from .._start.launch import WorkerPlan, rank_variables, wait_started
from .._start.layout import check_sharding, lay_out
from .._start.worker_class import Described, WorkerClass, describe_class
from .._transport.arguments import Arguments, NotPicklableError
from .._world import check_timeout
from ..exceptions import WorkerGroupError, WorkerStartError
from .transport import LocalTransport
from .worker import ADDRESS, LocalHandle, LocalWorker

# The node of the workers in errors.
NODE = "local"
# How long the end of a `with` block that an error leaves waits for workers that are busy.
AFTER_ERROR_S = 5.0
THREADS = "The workers of a LocalGroup are threads of this process"


class LocalGroup(TypedCalls):
    """A group whose workers are threads of this process, for tests of workers and of the code that calls them.

    It starts in milliseconds, and neither starts nor joins a Ray. `call`, `at`, `with_options` and `map` are those of
    every group, and so are their results, errors and timeouts. Each worker runs its methods one at a time, in the order
    of the calls. Arguments and results are pickled, so a worker shares no object with its caller or other workers.

    `current_worker()` and `report_progress()` work in the thread of a worker, in its coroutines, and in
    `asyncio.to_thread`; other threads that a worker starts do not belong to it. `os.environ` belongs to the whole
    process, so RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK and the variables of `configure_worker` are
    set only while the constructor of a worker runs. The constructors run one after the other, by rank.

    Use `launch` to test what needs a process for each worker: GPUs, environment variables that stay, globals and class
    attributes that workers do not share, workers that exit or are killed, restarts, resizes, lanes, ObjectRefs, async
    methods that overlap, collectives of `torch.distributed`, and speed. A worker that ends its process, with `os._exit`
    or by a crash, ends the test.

    Args:
        worker: a class, a `@ray.remote` class, whose options have no effect, or the full name of a class.
        workers: the number of workers, instead of axes.
        sharding_annotations: the axes over the ranks, instead of axes and of a number.
        init_args: the positional arguments of the constructor.
        init_kwargs: the keyword arguments of the constructor.
        timeout_s: the seconds that all constructors together may take.
        axes: the axes over the ranks and their sizes, the last one fastest, as for `launch`.

    Raises:
        TypeError, ValueError: an argument is not valid; nothing has been started.
        WorkerStartError: the class cannot be imported, or its constructor failed or was late. No worker is left, except
            for the thread of a constructor that does not return.

    >>> from fairlead_workergroup import Shard
    >>> with LocalGroup("collections.Counter", dp=2, tp=2, init_args=["aab"]) as group:
    ...     group.call("update", Shard(["a", "c"], "dp")).result()
    ...     group.call("most_common", 1, collect="dp").result()
    [None, None, None, None]
    [[('a', 3)], [('a', 2)]]
    """

    def __init__(
        self,
        worker: ClassLike,
        /,
        *,
        workers: int | None = None,
        sharding_annotations: NamedSharding | None = None,
        init_args: list[Any] | tuple[Any, ...] = (),
        init_kwargs: dict[str, Any] | None = None,
        timeout_s: float = 60.0,
        **axes: int,
    ) -> None:
        if sharding_annotations is None:
            others = RayVirtualCluster, RayWorkerGroup, launch
            sharding = NamedSharding.from_shape(**check_axes(LocalGroup, workers, axes, *others))
        elif workers is not None or axes:
            raise ValueError("LocalGroup needs sharding_annotations, axes or a number of workers: only one of these")
        else:
            sharding = check_sharding(sharding_annotations, getattr(sharding_annotations, "size", 0))
        check_start(init_args, init_kwargs or {}, timeout_s)
        places = lay_out(_make_slots(sharding.size), prefix="local")
        described = _describe(worker, places)
        self._workers = [_make_worker(place, described, sharding) for place in places]
        self._transport = transport = LocalTransport(self._workers)
        roster, fixed = _make_roster(described.name, places, sharding, self._workers), FixedMembership()
        self._sender = sender = _LocalSender(
            roster, Described(described), fixed, Counters(), None, put=transport.put, transport=transport
        )
        self._own_target = Target(sender, Mesh(sharding), sharding, MapOptions("round_robin", move_items=False))
        weakref.finalize(self, transport.stop)
        try:
            self._start(init_args, init_kwargs or {}, timeout_s)
        except BaseException:
            self._end_after_error()
            raise

    def _start(self, args: Sequence[Any], kwargs: Mapping[str, Any], timeout_s: float) -> None:
        """Run the constructors, each after that of the rank before, and wait for them."""
        now, name, transport = self._sender.roster.now, self._sender.roster.name_prefix, self._transport
        arguments = Arguments(self._sender.put)

        def prepare(at: object, value: Any) -> Any:
            try:
                return arguments.prepare(value)
            except NotPicklableError as error:
                raise TypeError(f"argument {at!r} of the constructor of {name!r}: {error}") from None

        sent = [prepare(at, value) for at, value in enumerate(args)]
        named = [
            {at: prepare(at, value) for at, value in {**kwargs, **one.init_kwargs}.items()} for one in self._workers
        ]
        self._sender.check_route(arguments.obstacle)
        transport.open(timeout_s)
        answers: list[Any] = []
        for rank, own in enumerate(named):
            (body,) = transport.encode([Request("__init__", sent, own)])
            body = replace(body, sources=(*body.sources, *((None, one) for one in answers[-1:])))
            answers += transport.send(now, [rank], [body], yields_items=False)
        environment = WorkerEnvironment()
        plans = [WorkerPlan(one.place, one.process, {}, environment, {}, frozenset()) for one in now.members]
        wait_started(answers, plans, name=name, timeout_s=timeout_s, check=lambda: None)

    def __repr__(self) -> str:
        return repr(self._sender.roster)

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self._sender.roster.world_size

    @property
    def sharding_annotations(self) -> NamedSharding:
        """The axes over the ranks."""
        return self._sender.roster.now.sharding

    def close(self, timeout: float | None = 30.0) -> None:
        """End the workers: wait for the methods that they run, and drop the calls that have not begun.

        You can call it again. No thread and no variable of the group is left.

        Args:
            timeout: the seconds to wait; None for no limit.

        Raises:
            WorkerGroupError: workers are late; the text has what they are doing. The threads end when their methods
                return.
        """
        check_timeout("timeout", timeout)
        self._sender.roster.end()
        self._transport.close(timeout)

    def _end_after_error(self) -> str:
        """Close the group; return what is late."""
        try:
            self.close(AFTER_ERROR_S)
        except WorkerGroupError as late:
            return str(late)
        return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif late := self._end_after_error():
            error.add_note(late)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{THREADS}, so it cannot be sent to another one.")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Such as `resize`, `lane` and `shutdown`.
            reason = f"A LocalGroup has no {name!r}. {THREADS}: use launch to test what needs processes."
            raise AttributeError(reason, name=name, obj=self)


class _LocalRoster(Roster):
    """The members of a group that needs no Ray."""

    def __repr__(self) -> str:
        return super().__repr__().replace("RayWorkerGroup", "LocalGroup", 1)

    @property
    def connected(self) -> bool:
        return True

    def check_connected(self) -> None:
        pass


@dataclass(eq=False, repr=False)
class _LocalSender(Sender):
    """Sends every call by the transport of the group, and refuses the others."""

    def check_retries(self, retries: int) -> None:
        if retries:
            raise ValueError(
                f"retries={retries} needs a group with restart=Restart(on_failure=True), and a LocalGroup restarts no "
                "workers. Use RayWorkerGroup to test it."
            )

    def check_route(self, obstacle: str) -> None:
        if obstacle:
            raise ValueError(f"{THREADS}, which cannot be called like this: {obstacle}. Use launch to test it.")

    def prepare(self, order: Order) -> Order:
        self.check_route(order.obstacle)
        return super().prepare(order)

    def cancel(self, futures: Mapping[int, Any], method: str, *, force: bool) -> list[int]:
        running = [rank for rank, future in futures.items() if not future.cancel(asks=False)]
        if force and running:
            raise WorkerGroupError(f"{THREADS}, and threads cannot be killed. Use launch to test `cancel(force=True)`.")
        return running


def _make_slots(count: int) -> list[Slot]:
    """Return slots of this process, without a reservation."""
    return [
        Slot(
            placement_group=PlacementGroup.empty(),
            bundle_index=rank,
            node_idx=0,
            node_id=NODE,
            node_ip=ADDRESS,
            node_rank=0,
            local_rank=rank,
        )
        for rank in range(count)
    ]


def _describe(worker: ClassLike, places: Sequence[Place]) -> WorkerClass:
    cls: Any = worker
    if isinstance(worker, str) and "." in worker:  # others are refused below
        try:
            cls = load(worker)
        except Exception as error:
            raise WorkerStartError(
                f"{worker!r} cannot be used as a worker: {error}. A LocalGroup imports the class in this process."
            ) from error
    asks = [configure_ask(place, None) for place in places]
    return describe_class(cls, asks=asks, node_id=NODE, runtime_env=None, timeout_s=0.0)


def _make_worker(place: Place, described: WorkerClass, sharding: NamedSharding) -> LocalWorker:
    """Return a worker; the resources that `configure_worker` requests have no meaning here."""
    _, configured, init_kwargs, overrides = described.configuration(place.rank)
    coords = sharding.get_worker_coords(place.rank)
    of_rank = rank_variables(place, sharding.size, ADDRESS)
    del of_rank["MASTER_ADDR"]  # no store listens there
    env = {**of_rank, **overrides.get("env_vars", {}), **configured}
    known = WorkerFacts(place.rank, 0, 0, sharding.size, place.name, coords, env).to_dict()
    of_group = {"communication_backend": None, "gradient_compression": None, "layout": sharding.to_dict()}
    return LocalWorker(make_process(place, coords), described, {**known, **of_group}, init_kwargs)


def _make_roster(name: str, places: Sequence[Place], sharding: NamedSharding, workers: Sequence[LocalWorker]) -> Roster:
    roster = _LocalRoster(name, places, sharding)
    roster.look_here = lambda processes: tuple(workers[one.rank].look() for one in processes)
    pairs = zip(workers, places, strict=True)
    started = [Started(LocalHandle(one.actor_id), place, one.process) for one, place in pairs]
    roster.commit(epoch=0, sharding=sharding, places=places, facts=(), started=started, resize=None)
    return roster
