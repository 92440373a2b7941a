# SPDX-License-Identifier: Apache-2.0
"""A group of workers: one process in each slot, called by rank or along named axes."""

import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Unpack

import ray

from fairlead_placement import RayVirtualCluster, Slot
from fairlead_placement.extension import head_deadline, release_when_dropped
from fairlead_sharding import NamedSharding
from fairlead_venvs import VenvSpec

from ._calls.call import call_hook
from ._calls.classic import ClassicCalls
from ._calls.handle import GroupHandle, GroupIdentity
from ._calls.map import MapOptions, Strategy
from ._calls.view import Target, TypedCalls
from ._context import check_compression
from ._membership import operations
from ._membership.change import Changes
from ._membership.core import Core
from ._membership.owned import Owned, Shutdown
from ._membership.places import check_sharding, lay_out
from ._membership.provision import GroupSpec, Provisioner
from ._model import GroupState, Place, Restart
from ._options import Elastic, FlatOptions, Timeouts, parse_memory, read_option, read_restart
from ._start.environment import WorkerOptions, check_env_vars, choose_python
from ._start.worker_class import ClassLike, RayWorkerBuilder
from ._status import ObservedGroup
from ._world import Deadline, check_timeout

logger = logging.getLogger(__name__)


class RayWorkerGroup(TypedCalls, ClassicCalls, ObservedGroup):
    """A group of worker processes, one in each slot, made from one class and called by rank or along named axes.

    Args:
        cluster: the place of the workers: a `RayVirtualCluster`, which is reserved here if it is not yet, or slots.
        remote_worker_builder: a `RayWorkerBuilder`; or a class or its full name, which is constructed without
            arguments.
        workers_per_node: the number of workers on each logical node: None for one in each slot, a number, or a list
            with a number for each logical node in use.
        name_prefix: the first part of the workers' names; the class's name if empty.
        bundle_indices_list: instead of `workers_per_node`, `(node_idx, [Ray's bundle indices])` for each *tied group*,
            whose workers share one model copy.
        sharding_annotations: the axes over the ranks; one axis `worker` if None.
        env_vars: environment variables of the workers. The driver's environment is not copied to them. The variables of
            ranks, `RAY_*` and those that choose devices are left out, with a warning.
        python: the Python of the workers: a `VenvSpec` or a uv command, which is built on their nodes if necessary, or
            the path of an interpreter that all nodes have. None is the entry of the class in `actor_environments` of
            fairlead-venvs, and without an entry the driver's Python. It must have the cluster's version of Ray, and
            needs no package of Fairlead.
        restart: how lost workers are restarted; None for `Restart()`, which leaves it to `restart_failed_workers`.
        elastic: the method that a resize calls; None for `Elastic()`.
        worker: the accelerators that a worker sees, and the master port; None for `WorkerOptions()`, with which it sees
            its own. Other options of Ray's actors are those of the class's own `@ray.remote`.
        memory_limit: the memory, in bytes or as "8GB" or "512MiB", that a worker and its descendants may hold together.
            Above it, Fairlead ends all of them, with kind "out-of-memory". Files, shared memory and the values of the
            object store do not count.
        async_communication: let the async methods of a worker overlap on one event loop, which its other methods
            block. "auto" does so for a class with async methods, as Ray does. Otherwise a worker runs one method at a
            time.
        timeouts: of the start and of calls; None for `Timeouts()`.
        flat: `restart_on_failure` and `max_restarts`, which stand for `restart`; `enable_load_balancing` and
            `load_balancing_strategy`, the defaults of `move_items` and `strategy` of `map`; and
            `enable_gradient_compression`, the compression that `fairlead_workergroup.torch.wrap_ddp` uses in the
            workers: True or "fp16", "bf16", "powersgd", or False for none.

    Raises:
        TypeError, ValueError: an argument is not valid; nothing has been launched.
        ResourceInsufficientError, PlacementTimeoutError: the cluster could not be reserved, has no room for another
            group, or has lost the node of a slot; or Ray drains that node.
        PortUnavailableError: another process uses the master port, or all ports of its range.
        WorkerStartError: a worker did not start. All workers have been ended.

    The constructor returns when every worker's `__init__` has finished. Use the group as a context manager, or call
    `shutdown`.

    Attributes:
        cluster: where the workers run: a `RayVirtualCluster` or a sequence of slots.
        name_prefix: the first part of the workers' names; the name of the class by default.
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
        restart: Restart | None = None,
        elastic: Elastic | None = None,
        worker: WorkerOptions | None = None,
        memory_limit: int | str | None = None,
        async_communication: bool | Literal["auto"] = False,
        timeouts: Timeouts | None = None,
        **flat: Unpack[FlatOptions],
    ) -> None:
        builder = remote_worker_builder
        if not isinstance(builder, RayWorkerBuilder):
            builder = RayWorkerBuilder(builder)
        if async_communication not in (True, False, "auto"):
            raise ValueError(f"async_communication must be True, False or 'auto', got {async_communication!r}")
        restart = read_restart(restart, flat, RayWorkerGroup.__init__)
        elastic = read_option("elastic", elastic, Elastic)
        timeouts = read_option("timeouts", timeouts, Timeouts)
        strategy: Strategy = flat.get("load_balancing_strategy", "round_robin")
        map_options = MapOptions(strategy=strategy, move_items=flat.get("enable_load_balancing", False))
        # It is unique on a node: the processes that carry it end with the group.
        token = uuid.uuid4().hex
        limit = 0 if memory_limit is None else parse_memory(memory_limit)
        spec = GroupSpec(
            cluster=cluster,
            builder=builder,
            python=choose_python(python, builder.ray_actor_class_fqn),
            env_vars=check_env_vars(env_vars),
            options=read_option("worker", worker, WorkerOptions),
            compression=check_compression(flat.get("enable_gradient_compression", False)),
            memory_limit=limit,
            token=token,
            concurrent=async_communication,
            start_timeout_s=float(timeouts.start_s),
            on_resize=elastic.on_resize,
        )
        self.cluster = cluster
        self.name_prefix: str = name_prefix or builder.ray_actor_class_fqn.rpartition(".")[2]
        places, sharding = self._lay_out(workers_per_node, bundle_indices_list, sharding_annotations)
        self._core = core = Core(
            self.name_prefix, places, sharding, policy=restart, call_timeout_s=timeouts.call_s, memory_limit=limit
        )
        self._target = Target(core, map_options)
        self._assemble(spec)
        self._start()

    def _lay_out(
        self,
        workers_per_node: int | Sequence[int] | None,
        bundle_indices_list: Sequence[tuple[int, Sequence[int]]] | None,
        given: NamedSharding | None,
    ) -> tuple[tuple[Place, ...], NamedSharding]:
        """Return the places of all ranks, and the axes over them."""
        slots = self.cluster.slots() if isinstance(self.cluster, RayVirtualCluster) else tuple(self.cluster)
        places = lay_out(
            slots, prefix=self.name_prefix, workers_per_node=workers_per_node, bundle_indices_list=bundle_indices_list
        )
        sharding = check_sharding(given, len(places))
        return tuple(replace(place, coords=sharding.get_worker_coords(place.rank)) for place in places), sharding

    def _assemble(self, spec: GroupSpec) -> None:
        """Make the parts around the core of the group."""
        core = self._core
        self._provisioner = Provisioner(spec, core, Owned(core), getattr(self.cluster, "port_range", None))
        self._changes = Changes(core, self._provisioner, partial(call_hook, core))
        core.changes = self._changes
        self._shutdown = Shutdown(core, self._changes, self._provisioner.owned)

    def _start(self) -> None:
        """Start all workers, or end everything."""
        owned, began = self._provisioner.owned, time.monotonic()
        release_when_dropped(self, owned.leak, partial(owned.close, Deadline()))
        try:
            self._changes.run(operations.start(), self._provisioner.deadline(None))
            self._provisioner.await_handles()
            took = time.monotonic() - began
            logger.info("Started %d worker(s) of %r in %.1f s.", self.world_size, self.name_prefix, took)
        except BaseException:
            self.shutdown(force=True)
            raise

    def __repr__(self) -> str:
        return repr(self._core)

    @property
    def workers(self) -> list[Any]:
        """The actor handles, by rank: `group.workers[0].step.remote(x)`; empty after `shutdown`."""
        return self._core.handles

    @property
    def worker_metadata(self) -> list[dict[str, Any]]:
        """A dict for each worker; empty after `shutdown`."""
        return self._core.worker_metadata

    @property
    def master_address(self) -> str:
        """The address of the node of rank 0, where the store of the workers' process group runs."""
        return self._core.now.master[0]

    @property
    def master_port(self) -> int:
        """The port that is leased there for the store."""
        return self._core.now.master[1]

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return len(self._core.now.members)

    @property
    def sharding_annotations(self) -> NamedSharding:
        """The axes over the ranks."""
        return self._core.now.sharding

    def state(self) -> GroupState:
        """Return who is in the group, and its epoch, as they are now.

        Returns:
            The state, which never changes.
        """
        return self._core.now

    def handle(self) -> GroupHandle:
        """Return a handle of the group, with which other processes of the cluster can call it.

        Returns:
            The handle, which can be pickled, such as an argument of a Ray task or actor.

        Raises:
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        self._core.check_alive()
        me, token = ray.get_runtime_context(), self._provisioner.spec.token
        return GroupHandle(GroupIdentity.here(self.name_prefix, token, me.get_job_id(), me.get_worker_id()))

    def restart(
        self, ranks: Sequence[int] | None = None, *, elsewhere: bool = False, timeout: float | None = None
    ) -> list[int]:
        """Restart workers: the same ranks with the same arguments, and the next incarnation.

        Living workers finish their calls first; one that is busy until the timeout is ended all the same. Calls of
        other threads wait until the restarted workers have run `Restart.method`. With `Restart(scope="group")` all
        workers are ended and started, with a new master port.

        Args:
            ranks: the ranks, whether their workers live or not; None for those that are dead. Only restarts of dead
                workers that are not named here count against `max_restarts`.
            elsewhere: start the given ranks in free slots of the cluster, for example because their node needs repair.
                Otherwise a worker restarts in its slot. If its node is lost or drains, it restarts in a free slot of
                the cluster, whose `replace_lost_nodes` reserves other slots in place of those on lost nodes.
            timeout: the seconds that the preparation and the calls before may take; None for `Timeouts.start_s`. The
                constructors and `Restart.method` of the new workers have as much time again.

        Returns:
            The ranks that were started; an empty list if `ranks` is None and no worker is dead.

        Raises:
            TypeError, ValueError, IndexError: wrong ranks, or too few free slots. Nothing has changed, as with the next
                two.
            PlacementError: the cluster cannot replace the lost node of one of the given ranks.
            ResizeTimeoutError: another change of the group, or calls being sent, took longer than `timeout`.
            WorkerFailureError: `max_restarts` is used up, there is no slot, or a worker did not start (kind
                "start-failed"). Dead workers stay dead, and you can try again.
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        check_timeout("timeout", timeout)
        if ranks is None and elsewhere:
            raise ValueError("restart(elsewhere=True) needs the ranks that move to other slots")
        operation = operations.restart_lost()
        if ranks is not None:
            chosen = operations.check_ranks(ranks)
            operations.check_members(chosen, self._core.check_alive())
            operation = operations.restart_ranks(chosen, elsewhere=elsewhere)
        self._core.check_alive()
        return self._changes.run(operation, self._provisioner.deadline(timeout))

    def restart_failed_workers(self) -> list[int]:
        """Restart the dead workers, as `restart()` does.

        Returns:
            The ranks that were started; an empty list if no worker is dead.

        Raises:
            WorkerFailureError, WorkerGroupError: as `restart` does.
        """
        return self.restart()

    def resize(self, /, *, slots: Sequence[Slot] | None = None, timeout: float | None = None, **sizes: int) -> int:
        """Change the number of workers along the slowest-varying axis: `group.resize(dp=6)`.

        The workers that stay keep their ranks and their state. New coordinates start in slots that the group does not
        use; the last coordinates leave. First the new workers start completely, while calls go on. Then calls of other
        threads wait until those before have ended, all workers get the facts of the new epoch (`world_size`, the mesh,
        `MASTER_PORT`, other rank variables), and run `on_resize`. Workers that leave finish their calls first.
        Lost workers that stay are started again.

        Args:
            slots: the slots of the new workers, in order, which may be those of another cluster; None for the first
                free ones of the cluster. Slots of nodes that are lost or drain are left out.
            timeout: the seconds that all of this may take, the environment included; None for `Timeouts.start_s`.
                Workers that leave and have not finished by then are ended.
            sizes: the axis and its new size.

        Returns:
            The epoch of the group.

        Raises:
            TypeError, ValueError: not one axis; another axis than the slowest-varying one; a size below 1; too few
                slots; the group has tied workers; or it has one `master_port` only. Nothing has changed, as with
                the next three.
            PlacementError: a given slot has no room for another group, or its node is lost or drains; or the cluster
                cannot replace the lost node of a worker that stays.
            WorkerStartError: a new worker did not start.
            ResizeTimeoutError: calls, or another change of the group, took longer than `timeout`.
            WorkerFailureError: a lost worker that stays cannot be restarted. Or a worker failed or was late after the
                epoch had begun (kind "resize-failed"), which cannot be undone, because others have given up their
                collectives: no call is sent until `restart_failed_workers()` or another `resize` has repaired it.
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        check_timeout("timeout", timeout)
        operations.check_resize(self._core.check_alive(), sizes, slots)
        if self._provisioner.has_one_port:
            raise ValueError(
                f"A resize needs a second master port, and this group has {self.master_port} only. Start it with a "
                "range of ports, WorkerOptions(master_port=(first, last)), or without master_port."
            )
        ((axis, size),) = sizes.items()
        operation = operations.resize(axis, size, slots)
        self._changes.run(operation, self._provisioner.deadline(timeout))
        return self._core.now.group_epoch

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = 30.0, force: bool = False) -> bool:
        """End the workers and the processes that they have started, rank 0 last, and release everything.

        Waits until all these processes and the threads of the group are gone. The processes that a worker has started
        get SIGTERM when the worker is gone, and SIGKILL 2 s later. You can call it again, also from several threads at
        once: the cleanup runs once, and all calls return the same value. It is safe when workers are dead or hung, and
        when Ray is down.

        Args:
            cleanup_method: a method that every living worker runs first.
            timeout: the seconds for all cleanups together, also for a cleanup of another thread, and for the answers of
                Ray's head; None for no limit.
            force: run no cleanup, and end the workers during the cleanup of another thread.

        Returns:
            Whether everything succeeded; failures are logged. False if Ray's head does not answer: the processes on
            this machine are ended, and Ray ends the others once its head answers.
        """
        with head_deadline(timeout):
            return self._shutdown.run(cleanup_method, timeout, force=force)

    def __enter__(self) -> "RayWorkerGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    if not TYPE_CHECKING:  # for a type checker, it would make every name an attribute

        def __getattr__(self, name):
            worker_class = getattr(self.__dict__.get("_core"), "worker_class", None)
            if name in getattr(worker_class, "methods", ()):
                raise AttributeError(f"{name!r} is a method of the workers: call it with group.call({name!r})")
            return super().__getattribute__(name)  # raises Python's own error

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RayWorkerGroup belongs to the process that made it; send its `handle()` instead")
