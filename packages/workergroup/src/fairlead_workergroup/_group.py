# SPDX-License-Identifier: Apache-2.0
"""A group of workers: one process per slot, called by rank or along named axes."""

import math
import threading
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar, overload

from ray import ObjectRef

from fairlead_placement import RayVirtualCluster, Slot
from fairlead_placement.spi import release_when_dropped
from fairlead_sharding import NamedSharding
from fairlead_venvs import VenvSpec

from ._builder import ClassLike, RayWorkerBuilder
from ._calls.call import Call
from ._calls.classic import ClassicCalls
from ._calls.dispatch import dispatch
from ._calls.errors import short_traceback
from ._calls.explain import CallExplanation
from ._calls.map import Strategy, check_strategy
from ._calls.plan import Axes, Mesh
from ._calls.results import MultiWorkerFuture
from ._calls.sender import Sender
from ._calls.view import Addressed, Balancing, CallOptions, GroupView
from ._calls.wait import ResultStream
from ._context import Compression, check_compression
from ._deadline import check_timeout
from ._display import table_html
from ._lifecycle.launcher import Launcher
from ._lifecycle.resources import Resources
from ._lifecycle.restart import Restarter, check_restart_policy
from ._lifecycle.shutdown import clean_up
from ._members import Roster
from ._observe.failures import Verdicts
from ._observe.memory import MemoryLimit, parse_memory
from ._observe.observer import STUCK_AFTER_S, Observer
from ._observe.statistics import Counters, GroupStatistics
from ._observe.status import StuckWorker, WorkerEvent, WorkerStatus, WorkerUsage
from ._observe.watch import Watch
from ._ray_private import actor_id_of, dead_actors
from ._start.environment import check_env_vars, choose_python
from ._start.layout import lay_out

Result = TypeVar("Result")
Item = TypeVar("Item")

# How long the shutdown of another thread may take once its workers are gone: it waits for nothing any more.
CLEANED_S = 10.0


class RayWorkerGroup:
    """A process per slot, all made from one class, addressed by rank or along named axes.

    Args:
        cluster: where the workers live: a `RayVirtualCluster` (reserved here if it is not), or slots.
        remote_worker_builder: a `RayWorkerBuilder`, or a class or its full name, which is then constructed without
            arguments.
        workers_per_node: workers on each logical node: None for one per slot, a number, or a list with a number
            for each logical node in use.
        name_prefix: the first part of the workers' names; the class's name if empty.
        bundle_indices_list: instead: `(node_idx, [Ray's bundle indices])` of each *tied group*, workers that share one
            model copy.
        sharding_annotations: the axes over the ranks; one axis `worker` if None.
        env_vars: variables of the workers. The driver's environment is not copied to them.
        python: what workers run in: a `VenvSpec` or a uv command, built on their nodes where it is not there yet; the
            path of an interpreter that all nodes have; None: what is registered for the class (`actor_environments` of
            fairlead-venvs), else this one's own. It must have the cluster's version of Ray, and needs nothing else of
            ours.
        restart_on_failure: start lost workers again before the next call that reaches one of them. The call that met
            the loss raises all the same, unless it was made with `retries`.
        max_restarts: how often: each rank, or with scope "group" the group.
        restart_scope: "worker": only what is lost; "group": all workers, with a new master port, which is what
            collectives need. With `restart_on_failure` and "group", every call restarts them while a worker is lost.
        on_restart: a method of the class, without arguments, that restarted workers run first, such as one that reloads
            a checkpoint.
        memory_limit: bytes, or "8GB" or "512MiB", of memory that a worker and the processes it has started may hold
            together, once its constructor has finished, before all of them are ended, with kind "out-of-memory". Files
            and shared memory do not count, nor do the values of the object store.
        async_communication: async methods of a worker overlap, on one event loop, which its other methods block.
            Otherwise a worker runs one method at a time.
        enable_load_balancing: what `map` has given to a worker that dies goes to the others.
        load_balancing_strategy: who gets the next item of `map`: "round_robin", "least_loaded", or a function of the
            number of items each worker has now, that returns which of them.
        enable_gradient_compression: what `fairlead_workergroup.torch.wrap_ddp` uses in the workers: True or "fp16",
            "bf16", "powersgd", or False for none.
        call_timeout_s: seconds that a `call` may take when it says nothing else; None: no limit.
        start_timeout_s: seconds that all constructors together may take.

    Raises:
        TypeError, ValueError: a bad argument; nothing has been launched.
        ResourceInsufficientError, PlacementTimeoutError: the cluster could not be reserved, or has no room for another
            group.
        WorkerStartError: a worker did not start. All of them have been ended.

    The constructor returns when every worker's `__init__` has finished. Use the group as a context manager, or call
    `shutdown`.

    Attributes:
        cluster: as given.
        name_prefix: the first part of the workers' names; the class's name if none was given.
        world_size: how many workers there are.
        sharding_annotations: the axes over the ranks.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster | Sequence[Slot],
        remote_worker_builder: RayWorkerBuilder | ClassLike,
        workers_per_node: int | Sequence[int] | None = None,
        name_prefix: str = "",
        bundle_indices_list: Sequence[tuple[int, Sequence[int]]] | None = None,
        sharding_annotations: NamedSharding | None = None,
        env_vars: Mapping[str, str] | None = None,
        *,
        python: str | VenvSpec | None = None,
        restart_on_failure: bool = False,
        max_restarts: int = 3,
        restart_scope: Literal["worker", "group"] = "worker",
        on_restart: str | None = None,
        memory_limit: int | str | None = None,
        async_communication: bool = False,
        enable_load_balancing: bool = False,
        load_balancing_strategy: Strategy = "round_robin",
        enable_gradient_compression: bool | Compression = False,
        call_timeout_s: float | None = None,
        start_timeout_s: float = 600.0,
    ) -> None:
        given = remote_worker_builder
        builder = given if isinstance(given, RayWorkerBuilder) else RayWorkerBuilder(given)
        env_vars = dict(env_vars or {})
        check_env_vars(env_vars)
        if not 0 < start_timeout_s < math.inf:
            raise ValueError(f"start_timeout_s must be positive and finite, got {start_timeout_s!r}")
        call_timeout_s = check_timeout("call_timeout_s", call_timeout_s)
        self._balancing = Balancing(check_strategy(load_balancing_strategy), enable_load_balancing)
        compression = check_compression(enable_gradient_compression)
        policy = check_restart_policy(restart_on_failure, max_restarts, restart_scope)
        # Long enough that no other group on a node has the same: what carries it is ended with the group.
        token = uuid.uuid4().hex
        limit = None if memory_limit is None else MemoryLimit(token, parse_memory(memory_limit))
        slots = cluster.slots() if isinstance(cluster, RayVirtualCluster) else tuple(cluster)
        self.name_prefix: str = name_prefix or builder.ray_actor_class_fqn.rpartition(".")[2]
        places = lay_out(
            slots,
            prefix=self.name_prefix,
            workers_per_node=workers_per_node,
            bundle_indices_list=bundle_indices_list,
        )
        self.cluster = cluster
        self.world_size: int = len(places)
        self.sharding_annotations: NamedSharding = _check_sharding(sharding_annotations, self.world_size)
        self._mesh = Mesh(self.sharding_annotations)
        self._roster = Roster(self.name_prefix, places, self.sharding_annotations)
        self._resources = Resources(self._roster)
        self._counters = Counters()
        self._observer = Observer(self._roster)
        self._verdicts = Verdicts(self._roster, limit)
        self._launcher = Launcher(
            self._roster,
            self._resources,
            self._counters,
            cluster=cluster,
            worker=builder.worker,
            python=choose_python(python, builder.ray_actor_class_fqn),
            env_vars=env_vars,
            memory_limit=limit,
            token=token,
            concurrent=async_communication,
            timeout_s=float(start_timeout_s),
        )
        restarter = Restarter(
            self._roster, self._resources, self._launcher, self._verdicts, policy, cluster=cluster, slots=slots
        )
        self._sender = Sender(
            self._roster,
            self._launcher,
            restarter,
            self._verdicts,
            self._counters,
            call_timeout_s=call_timeout_s,
            after_restart=_RunAfterRestart(on_restart, float(start_timeout_s)),
        )
        self._classic = ClassicCalls(self._sender, self.sharding_annotations)
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        # Held by the thread that runs the cleanup. Reentrant: a signal's handler may shut down in the middle of it.
        self._cleaning = threading.RLock()
        self._shut: bool | None = None

        self._resources.claim_slots(places)
        release_when_dropped(self, self._resources.leak, self._resources.give_back)
        try:
            self._launcher.prepare(places)
            if on_restart is not None:
                self._sender.method(on_restart)
            facts = {
                "communication_backend": getattr(cluster, "communication_backend", None),
                "gradient_compression": compression,
            }
            self._launcher.store(builder.args, builder.kwargs, sharding=self.sharding_annotations, facts=facts)
            self._launcher.start(range(self.world_size))
        except BaseException:
            self.shutdown(force=True)
            raise

    def __repr__(self) -> str:
        return repr(self._roster)

    def _repr_html_(self) -> str:
        shown = ("global_rank", "name", "state", "node_idx", "node_id")
        now = self._roster.snapshot()
        rows = [(*(worker[key] for key in shown), now[worker["global_rank"]].coords) for worker in self.worker_metadata]
        return table_html(repr(self), (*shown, "coords"), rows)

    @property
    def workers(self) -> list[Any]:
        """The actor handles, by rank: `group.workers[0].step.remote(x)`; empty after `shutdown`."""
        return self._roster.handles

    @property
    def worker_metadata(self) -> list[dict[str, Any]]:
        """A dict per worker; empty after `shutdown`."""
        return self._roster.worker_metadata

    @property
    def master_address(self) -> str:
        """The address of the node of rank 0, where the workers' process group has its store."""
        return self._launcher.master[0]

    @property
    def master_port(self) -> int:
        """The port that was leased there for it."""
        return self._launcher.master[1]

    @property
    def ranks(self) -> list[int]:
        """The ranks of its workers, ascending."""
        return self._mesh.ranks

    @property
    def coords(self) -> dict[int, dict[str, int]]:
        """The coordinates of each rank."""
        return self._everybody.coords

    @property
    def _everybody(self) -> Addressed:
        # Not kept: it refers to the group, which must go as soon as nobody holds it.
        return Addressed(self._sender, self, self._mesh, self._balancing)

    @property
    def dp_size(self) -> int:
        """The number of tied groups; compatible with the original system."""
        return self._roster.snapshot().places[-1].tied_group + 1

    @property
    def dp_leader_worker_indices(self) -> list[int]:
        """The rank of the first worker of each tied group; compatible with the original system."""
        return [place.rank for place in self._roster.snapshot().places if place.tied_rank == 0]

    def get_dp_leader_worker_idx(self, dp_shard_idx: int) -> int:
        """Return the rank of the first worker of a tied group; compatible with the original system.

        Raises:
            IndexError: there is no such group.
        """
        leaders = self.dp_leader_worker_indices
        if not 0 <= dp_shard_idx < len(leaders):
            raise IndexError(f"dp_shard_idx {dp_shard_idx} is out of range: valid are 0 to {len(leaders) - 1}")
        return leaders[dp_shard_idx]

    def at(self, /, **coords: int | slice) -> GroupView:
        """Return a view of the workers at these coordinates: an integer drops the axis, a slice keeps it.

        As in numpy: -1 is the last, and what a slice leaves is counted from 0. The view is called as the group is.

        Raises:
            ValueError: an axis that does not exist, or a slice that selects nobody.
            IndexError: a coordinate outside its axis; names the axis and its size.
        """
        return GroupView(self._everybody.at(coords))

    def with_options(
        self,
        *,
        collect: Axes = None,
        first_along: Axes = (),
        timeout: float | None = None,
        retries: int = 0,
        discard: bool = False,
    ) -> GroupView:
        """Return a view whose `call` is made with these options, and hands every keyword on to the method.

        For methods whose parameters are named as our options are.

        Args:
            collect, first_along, timeout, retries, discard: as of `call`.

        Raises:
            TypeError, ValueError: an axis that does not exist, or options that contradict each other.
        """
        return self._everybody.with_options(CallOptions(collect, first_along, timeout, retries, discard))

    @overload
    def call(
        self,
        method: str,
        /,
        *args: Any,
        collect: Axes = None,
        first_along: Axes = (),
        timeout: float | None = None,
        retries: int = 0,
        discard: bool = False,
        **kwargs: Any,
    ) -> Call: ...
    @overload
    def call(self, method: Callable[..., Any], /, *args: Any, discard: Literal[True], **kwargs: Any) -> Call[None]: ...
    @overload
    def call(
        self, method: Callable[..., Coroutine[Any, Any, Result]], /, *args: Any, collect: tuple[()], **kwargs: Any
    ) -> Call[Result]: ...
    @overload
    def call(
        self,
        method: Callable[..., Coroutine[Any, Any, Result]],
        /,
        *args: Any,
        collect: Axes = None,
        first_along: Axes = (),
        timeout: float | None = None,
        retries: int = 0,
        discard: bool = False,
        **kwargs: Any,
    ) -> Call[list[Result]]: ...
    @overload
    def call(
        self,
        method: Callable[..., Iterator[Item] | AsyncIterator[Item]],
        /,
        *args: Any,
        collect: tuple[()],
        **kwargs: Any,
    ) -> Call[list[Item]]: ...
    @overload
    def call(
        self,
        method: Callable[..., Iterator[Item] | AsyncIterator[Item]],
        /,
        *args: Any,
        collect: Axes = None,
        first_along: Axes = (),
        timeout: float | None = None,
        retries: int = 0,
        discard: bool = False,
        **kwargs: Any,
    ) -> Call[list[list[Item]]]: ...
    @overload
    def call(self, method: Callable[..., Result], /, *args: Any, collect: tuple[()], **kwargs: Any) -> Call[Result]: ...
    @overload
    def call(
        self,
        method: Callable[..., Result],
        /,
        *args: Any,
        collect: Axes = None,
        first_along: Axes = (),
        timeout: float | None = None,
        retries: int = 0,
        discard: bool = False,
        **kwargs: Any,
    ) -> Call[list[Result]]: ...
    def call(
        self,
        method: str | Callable[..., Any],
        /,
        *args: Any,
        collect: Axes = None,
        first_along: Axes = (),
        timeout: float | None = None,
        retries: int = 0,
        discard: bool = False,
        **kwargs: Any,
    ) -> Call:
        """Call a method of all workers here, and say who gets what and who answers.

        Every argument goes to all of them alike unless it is wrapped: `Shard(values, *axes)`, `PerWorker(values)`. An
        ObjectRef or a `Call` among them is passed on; the driver sees nothing of it. Small plain values travel with
        the call, everything else is stored once, however many workers get it.

        A function is a method of the class if the class has it, inherited or decorated or under another name, and
        the name of that method is called. Every other function is pickled: by value, or by name if it is from an
        installed package or from the package that the workers import their class from.

        On a running event loop a call that has to wait, for a restart or for calls of other threads, is sent later: it
        is returned at once, and asking for its results raises what would be raised here otherwise.

        Args:
            method: its name; or the method itself, `Model.loss`; or any other function, which runs in each worker with
                the user's instance as its first argument: `f(worker, *args, **kwargs)`.
            args: positional arguments of the method.
            collect: None: everybody called answers, a list by rank. Axes: one answer for each coordinate along them,
                row-major in the order given, by the worker at coordinate 0 of all others. `()`: one worker answers.
            first_along: only coordinate 0 along these is called.
            timeout: seconds until `CallTimeoutError`, from now; None: the group's `call_timeout_s`.
            retries: how often `result` and `await` repeat it on workers that it lost, after starting them again;
                with `restart_scope="group"`, on all. Needs a group with `restart_on_failure`.
            discard: nobody answers, and nothing that the method returns is stored.
            kwargs: keyword arguments of the method.

        Raises:
            AttributeError, TypeError: there is no such method, it does not take these arguments, or the function
                cannot be pickled.
            ValueError: an axis that does not exist, too few or too many pieces or values, or options that contradict
                each other or the group.
            WorkerFailureError: a worker that would be called is known to be dead, and not restarted.
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        options = CallOptions(collect, first_along, timeout, retries, discard)
        return self._everybody.call(method, options, args, kwargs)

    def explain(
        self,
        method: str | Callable[..., Any],
        /,
        *args: Any,
        collect: Axes = None,
        first_along: Axes = (),
        timeout: float | None = None,
        retries: int = 0,
        discard: bool = False,
        **kwargs: Any,
    ) -> CallExplanation:
        """Return what `call` with these arguments would do: pieces, stored values and answers.

        Nothing is stored or called. Print it, or look at it in a notebook.

        Raises:
            AttributeError, TypeError, ValueError: as of `call`.
        """
        options = CallOptions(collect, first_along, timeout, retries, discard)
        return self._everybody.explain(method, options, args, kwargs)

    def map(
        self,
        method: str | Callable[..., Any],
        items: Iterable[Any],
        /,
        *,
        max_in_flight: int = 2,
        ordered: bool = True,
        strategy: Strategy | None = None,
        timeout: float | None = None,
        return_exceptions: bool = False,
    ) -> ResultStream[Any]:
        """Call a method once for each item, each time on one worker; return the results for `for` and `async for`.

        The first worker of each tied group takes part; so, without tied groups, all do. Items are taken one by one, as
        workers become free and results are asked for. A progress bar shows on a terminal when it takes over a second.

        Args:
            method: its name, or a function, as of `call`; an item is its only argument.
            items: what to work on.
            max_in_flight: how many items each worker has at a time: the next one is there when one is done.
            ordered: results in the order of the items, else as they come.
            strategy: who gets the next item: "round_robin"; "least_loaded", whoever has fewest; or a function of the
                number of items each worker has now, that returns which of them; None: the group's
                `load_balancing_strategy`.
            timeout: seconds that one item may take, its time in a worker's queue included; None: that of
                `with_options`, or else the group's `call_timeout_s`.
            return_exceptions: give the exception of an item that fails as its result and go on with the others. An item
                that runs out of time runs on, and its value is dropped. The loss of the last worker is raised.

        The `retries` of `with_options` hold for each item; its other options have no meaning here.

        Raises:
            AttributeError, TypeError, ValueError: there is no such method, or a bad argument, or an option of
                `with_options` that has no meaning here.
            WorkerGroupError: the group, or its Ray, has been shut down.
            CallTimeoutError: an item took longer than `timeout`.
            WorkerFailureError: a worker was lost. With the group's `enable_load_balancing`, its items go to the others,
                so that an item may be worked on twice; an item that three workers were lost with is given up.
            Exception: a worker's own exception, with its type and a note that names the item. What other workers have
                been given is cancelled.
        """
        return self._everybody.map(
            method,
            items,
            CallOptions(),
            max_in_flight=max_in_flight,
            ordered=ordered,
            strategy=strategy,
            timeout=timeout,
            return_exceptions=return_exceptions,
        )

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int, *args: Any, **kwargs: Any
    ) -> ObjectRef[Any]:
        """Call a method of one worker.

        Compatible with the original system; new code uses `call`.

        Args:
            method_name: the method's name.
            worker_idx: the worker's rank.
            args: positional arguments of the method.
            kwargs: keyword arguments of the method.

        Returns:
            The result's ref; for a generator method, a generator of refs.

        Raises:
            IndexError: there is no such rank.
            AttributeError, TypeError: there is no such method, or it does not take these arguments.
            WorkerFailureError: the worker is known to be dead, and not restarted.
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        future: ObjectRef[Any] = self._classic.call_one(self, method_name, worker_idx, args, kwargs)
        return future

    def run_all_workers_single_data(
        self, method_name: str, *args: Any, run_rank_0_only_axes: Axes = None, **kwargs: Any
    ) -> list[ObjectRef[Any]]:
        """Call a method of all workers with the same arguments.

        Compatible with the original system; new code uses `call`.

        Args:
            method_name: the method's name.
            args: positional arguments of the method.
            run_rank_0_only_axes: along these axes only coordinate 0 is called.
            kwargs: keyword arguments of the method.

        Returns:
            The refs of the workers called, by rank.

        Raises:
            ValueError: an axis that does not exist.
            AttributeError, TypeError, WorkerFailureError, WorkerGroupError: as of `run_single_worker_single_data`.
        """
        return self._classic.call_all(self, method_name, args, kwargs, leaders_on=run_rank_0_only_axes)

    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *args: Sequence[Any],
        run_rank_0_only_axes: Axes = None,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Sequence[Any],
    ) -> list[ObjectRef[Any]]:
        """Call a method of all workers, each with arguments of its own.

        Compatible with the original system; new code uses `call`.

        Args:
            method_name: the method's name.
            args: a list per positional argument, with one value for each worker called, by rank.
            run_rank_0_only_axes: along these axes only coordinate 0 is called, and has a value.
            common_kwargs: keyword arguments that are the same for all.
            kwargs: a list per keyword argument, as `args`.

        Returns:
            The refs of the workers called, by rank.

        Raises:
            ValueError: a list with too few or too many values, or a name in both `kwargs` and `common_kwargs`.
            AttributeError, TypeError, WorkerFailureError, WorkerGroupError: as of `run_single_worker_single_data`.
        """
        return self._classic.call_each(
            self, method_name, args, kwargs, leaders_on=run_rank_0_only_axes, common=common_kwargs
        )

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        *args: Any,
        in_sharded_axes: Axes = None,
        replicate_on_axes: Axes = None,
        output_is_replicated: Axes = None,
        make_dummy_calls_to_free_axes: bool = False,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Call:
        """Call a method of workers with the pieces of the data at their coordinates.

        Compatible with the original system; new code uses `call`.

        Args:
            method_name: the method's name.
            args: a nested sequence per positional argument: one level for each of `in_sharded_axes`.
            in_sharded_axes: the worker at coordinate c along them gets piece c.
            replicate_on_axes: everybody along them gets the same piece. Along axes in neither, only coordinate 0 is
                called.
            output_is_replicated: of the workers called, only coordinate 0 along these answers.
            make_dummy_calls_to_free_axes: call the others too, with None for every piece; they do not answer.
            common_kwargs: keyword arguments that are the same for all, dummy calls included.
            kwargs: a nested sequence per keyword argument, as `args`.

        Returns:
            The call, a `MultiWorkerFuture` of the answers by rank; `get_all_worker_results` fetches them.

        Raises:
            ValueError: an axis that does not exist or is both sharded and replicated; too few or too many pieces, at
                any depth; a name in both `kwargs` and `common_kwargs`.
            AttributeError, TypeError, WorkerFailureError, WorkerGroupError: as of `run_single_worker_single_data`.
        """
        return self._classic.call_sharded(
            self,
            method_name,
            args,
            kwargs,
            sharded=in_sharded_axes,
            replicated=replicate_on_axes,
            output_replicated=output_is_replicated,
            dummy_calls=make_dummy_calls_to_free_axes,
            common=common_kwargs,
        )

    def get_all_worker_results(
        self, future_bundle: MultiWorkerFuture | Sequence[Any], return_generators_as_proxies: bool = False
    ) -> list[Any]:
        """Wait for a call and fetch its results, and nothing else.

        Compatible with the original system; new code uses `Call.result`.

        Args:
            future_bundle: what a classic method returned.
            return_generators_as_proxies: leave generators as they are instead of collecting their items.

        Raises:
            CallTimeoutError: a worker has not finished by the group's `call_timeout_s`, which counts from the call; for
                ObjectRefs that the group did not make, from now.
            WorkerFailureError: a worker was lost.
            Exception: a worker's own exception, with its type and a note for each failing rank.
        """
        with short_traceback():
            return self._classic.fetch(future_bundle, proxies=return_generators_as_proxies)

    def statistics(self) -> GroupStatistics:
        """Return the counts of what has been stored, sent and fetched so far."""
        return self._counters.now

    def get_worker_status(self, *, stuck_after_s: float = STUCK_AFTER_S) -> list[WorkerStatus]:
        """Return what each worker is doing, by rank; `worker_metadata` and the cluster's grid then show the states.

        The workers are not asked: their records are read on their nodes, one request a node, so that it works while
        they are busy or hang. Who is dead is known from Ray.

        Args:
            stuck_after_s: a busy worker without progress for so many seconds is "stuck".

        Raises:
            ValueError: `stuck_after_s` is not a positive number.
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        return self._observer.read_status(stuck_after_s)

    def get_resource_usage(self) -> list[WorkerUsage]:
        """Return what the workers' processes use, by rank, measured on their nodes: one request a node.

        Left out are workers whose process is gone, or whose node does not answer.

        Raises:
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        return self._observer.read_usage()

    def detect_stuck_workers(self, timeout_s: float = STUCK_AFTER_S, dump_stacks: bool = True) -> list[StuckWorker]:
        """Return the living workers without progress for `timeout_s` seconds, whether they are busy or stopped.

        Progress is the start or end of a method, an item of a generator, or `report_progress`. When most of the group
        waits at one place, the notes name the ranks that are not there.

        Args:
            timeout_s: seconds without progress.
            dump_stacks: have those that are stuck, and nobody else, write their Python stacks, which works while they
                hang in native code and hold the GIL. The signal for it (SIGRTMIN+5) makes a sleep or a poll in native
                code return early, with EINTR.

        Raises:
            ValueError: `timeout_s` is not a positive number.
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        return self._observer.find_stuck(timeout_s, dump_stacks=dump_stacks)

    def watch(
        self,
        interval_s: float = 5.0,
        stuck_after_s: float = STUCK_AFTER_S,
        on_event: Callable[[WorkerEvent], object] | None = None,
        *,
        slow_after_s: float = 60.0,
    ) -> Watch:
        """Look at the workers in the background, and report each event of a worker once.

        Each event is logged (logger `fairlead_workergroup`), counted (Ray's metric `fairlead_worker_events`, tags
        `group` and `event`), and given to `on_event`. What a lost worker died of is known to the next call.

        Args:
            interval_s: seconds between two looks, of one request a node each.
            stuck_after_s: "worker-stuck" when a worker has made no progress for so many seconds, as of
                `detect_stuck_workers`.
            on_event: called with each event, on the watch's own thread; what it raises is logged.
            slow_after_s: "call-slow", once a call, when it has made no progress for so many seconds.

        Returns:
            A handle to close; a context manager. The end of the group ends it too.

        Raises:
            ValueError: a number that is not positive.
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        self._roster.check_alive()
        watch = Watch(
            self,
            self._roster,
            self._observer,
            self._verdicts,
            interval_s=interval_s,
            stuck_after_s=stuck_after_s,
            slow_after_s=slow_after_s,
            on_event=on_event,
        )
        self._watches.add(watch)
        return watch

    def restart_failed_workers(self) -> list[int]:
        """Start the workers that are dead again: the same ranks with the same arguments, incarnation + 1.

        In the same slot; where its node is gone, in the one the cluster's `replace_lost_nodes` gives for it. With
        `restart_scope="group"` all workers are ended and started, with a new master port. Then `on_restart` runs on
        those that were started. Calls of other threads wait meanwhile.

        Returns:
            The ranks that were started; none if nothing is dead.

        Raises:
            WorkerFailureError: `max_restarts` is used up, there is no slot, or a worker did not start (kind
                "start-failed"). What is dead stays dead, and can be tried again.
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        return self._sender.restart()

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = 30.0, force: bool = False) -> bool:
        """End the workers and the processes they have started, rank 0 last, and give back everything the group held.

        Waits until all these processes are gone. What a worker has started gets SIGTERM when the worker is gone, and
        SIGKILL 2 s later. Can be repeated, also by several threads at once: the cleanup runs
        once, and all of them return the same. Safe when workers are dead or hung, and when Ray is down.

        Args:
            cleanup_method: a method that every living worker runs first.
            timeout: seconds for all cleanups together, also for one that another thread has started; None: no limit.
            force: no cleanup; the workers are ended in the middle of one that another thread has started.

        Returns:
            Whether all went well; what did not is logged.
        """
        if self._shut is not None:
            return self._shut
        # A restart that another thread has under way sees it, and gives back what it had started.
        self._roster.begin_end()
        for watch in list(self._watches):
            watch.close()
        limit = 0.0 if force else -1.0 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
        if self._cleaning.acquire(timeout=limit):
            try:
                if self._shut is None:
                    self._shut = self._clean_up_and_end(None if force else cleanup_method, timeout)
            finally:
                self._cleaning.release()
            return self._shut
        # Another thread is in its cleanup, which fails as soon as its workers are gone.
        self._end_workers()
        if self._cleaning.acquire(timeout=CLEANED_S):
            self._cleaning.release()
        return bool(self._shut)

    def _clean_up_and_end(self, cleanup_method: str | None, timeout: float | None) -> bool:
        clean = True
        try:
            now = self._roster.snapshot()
            if cleanup_method is not None and self.workers and self._roster.connected:
                dead = dead_actors()
                living = {
                    member.rank: member.handle
                    for member in now.members
                    if member.failure is None and actor_id_of(member.handle) not in dead
                }
                clean = clean_up(living, cleanup_method, timeout)
        finally:
            self._end_workers()
        return clean and self._resources.gave_all_back

    def _end_workers(self) -> None:
        self._roster.end()
        self._launcher.release()
        self._resources.give_back()

    def __enter__(self) -> "RayWorkerGroup":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RayWorkerGroup belongs to its driver; send the handles in its `workers` instead")


class _RunAfterRestart:
    """Runs `on_restart` on workers that have been started again."""

    def __init__(self, method: str | None, timeout_s: float) -> None:
        self._method = method
        self._timeout_s = timeout_s

    def __call__(self, sender: Sender, ranks: list[int]) -> None:
        """Run it on these ranks, and wait for it."""
        if self._method is None:
            return
        call = dispatch(
            sender,
            None,
            self._method,
            ranks,
            [],
            {},
            answers=[False] * len(ranks),
            returned=[],
            timeout_s=self._timeout_s,
            discard=True,
            may_wait=False,  # the calls that wait do so for this restart
        )
        call.result()


def _check_sharding(given: NamedSharding | None, world_size: int) -> NamedSharding:
    if given is None:
        return NamedSharding.from_shape(worker=world_size)
    if not isinstance(given, NamedSharding):
        raise TypeError(f"sharding_annotations must be a NamedSharding, got {type(given).__name__}")
    if given.size != world_size:
        raise ValueError(f"sharding_annotations has {given.size} ranks {given.shape}, the group {world_size} workers")
    if sorted(given.layout.ravel().tolist()) != list(range(world_size)):
        raise ValueError(f"sharding_annotations must hold the ranks 0 to {world_size - 1}, got {given!r}")
    return given
