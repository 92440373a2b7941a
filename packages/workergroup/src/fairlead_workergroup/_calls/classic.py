# SPDX-License-Identifier: Apache-2.0
"""The members of NeMo RL's worker group, on top of the planning and sending of every call."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray import ObjectRef

from fairlead_sharding import NamedSharding

from .._membership.losses import note_known_dead
from .._replies import short_traceback
from .call import Call, as_call, send_call
from .plan import Axes, CallOptions, Column, Recipients, column_per_worker, first_of, make_plan, prepare_call, replicate
from .results import MultiWorkerFuture
from .view import AddressedWorkers


class ClassicCalls(AddressedWorkers):
    """The members of NeMo RL's worker group."""

    @property
    def dp_size(self) -> int:
        """The number of tied groups; compatible with NeMo RL."""
        return self._target.core.now.places[-1].tied_group + 1

    @property
    def dp_leader_worker_indices(self) -> list[int]:
        """The ranks of the first workers of the tied groups; compatible with NeMo RL."""
        return [place.rank for place in self._target.core.now.places if place.tied_rank == 0]

    def get_dp_leader_worker_idx(self, dp_shard_idx: int) -> int:
        """Return the rank of the first worker of a tied group; compatible with NeMo RL.

        Raises:
            IndexError: there is no such tied group.
        """
        leaders = self.dp_leader_worker_indices
        if not 0 <= dp_shard_idx < len(leaders):
            raise IndexError(f"dp_shard_idx {dp_shard_idx} is out of range: valid are 0 to {len(leaders) - 1}")
        return leaders[dp_shard_idx]

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int, *args: Any, **kwargs: Any
    ) -> ObjectRef[Any]:
        """Call a method of one worker, as NeMo RL does; new code uses `call`.

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
            WorkerFailureError: the worker is known to be dead, also if only `ray.get` of an earlier call has met its
                death, and the group does not restart it.
            WorkerGroupError: the group, or its Ray, has been shut down.
            CallTimeoutError: an event loop runs here, and the call would have to wait for a restart or a resize. `call`
                waits without blocking the loop.
        """
        sharding = self._target.sharding
        size = sharding.size
        if isinstance(worker_idx, bool) or not isinstance(worker_idx, int):
            raise TypeError(f"worker_idx must be an int, got {worker_idx!r}")
        if not 0 <= worker_idx < size:
            raise IndexError(f"worker_idx {worker_idx} is out of range: the group has ranks 0 to {size - 1}")
        recipients = Recipients([worker_idx], [worker_idx], None)
        future: ObjectRef[Any]
        (future,) = self._dispatch(sharding, method_name, recipients, args, kwargs, replicate).futures
        return future

    def run_all_workers_single_data(
        self, method_name: str, *args: Any, run_rank_0_only_axes: Axes = None, **kwargs: Any
    ) -> list[ObjectRef[Any]]:
        """Call a method of all workers with the same arguments, as NeMo RL does; new code uses `call`.

        Args:
            method_name: the method's name.
            args: positional arguments of the method.
            run_rank_0_only_axes: along these axes only coordinate 0 is called.
            kwargs: keyword arguments of the method.

        Returns:
            The refs of the called workers, by rank.

        Raises:
            ValueError: an axis does not exist.
            AttributeError, TypeError, WorkerFailureError, WorkerGroupError: as `run_single_worker_single_data` does.
        """
        sharding = self._target.sharding
        plan = make_plan(first_of(sharding, run_rank_0_only_axes), CallOptions())
        return self._dispatch(sharding, method_name, plan, args, kwargs, replicate).futures

    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *args: Sequence[Any],
        run_rank_0_only_axes: Axes = None,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Sequence[Any],
    ) -> list[ObjectRef[Any]]:
        """Call a method of all workers, each with its own arguments, as NeMo RL does; new code uses `call`.

        Args:
            method_name: the method's name.
            args: a list for each positional argument, with one value for each called worker, by rank.
            run_rank_0_only_axes: along these axes only coordinate 0 is called, and has a value.
            common_kwargs: keyword arguments that are the same for all workers.
            kwargs: a list for each keyword argument, as for `args`.

        Returns:
            The refs of the called workers, by rank.

        Raises:
            ValueError: there is no list, a list has too few or too many values, or a name is in both `kwargs` and
                `common_kwargs`.
            AttributeError, TypeError, WorkerFailureError, WorkerGroupError: as `run_single_worker_single_data` does.
        """
        if not args and not kwargs:
            raise ValueError(
                f"run_all_workers_multiple_data({method_name!r}) needs at least one list with a value for each worker, "
                "got none. For the same arguments everywhere, use run_all_workers_single_data."
            )
        sharding = self._target.sharding
        plan = make_plan(first_of(sharding, run_rank_0_only_axes), CallOptions())

        def column(values: Any) -> Column:
            # Unlike `PerWorker`, NeMo RL accepts a pandas Series, which has keys.
            is_series = hasattr(values, "keys") and not isinstance(values, Mapping)
            return column_per_worker(list(values) if is_series else values, len(plan.called))

        return self._dispatch(sharding, method_name, plan, args, kwargs, column, common_kwargs).futures

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
        """Call a method of workers with the pieces at their coordinates, as NeMo RL does; new code uses `call`.

        Args:
            method_name: the method's name.
            args: a nested sequence for each positional argument, with one level for each of `in_sharded_axes`.
            in_sharded_axes: the worker at coordinate c along these axes gets piece c.
            replicate_on_axes: all workers along these axes get the same piece. Along axes that are in neither, only
                coordinate 0 is called.
            output_is_replicated: of the called workers, only coordinate 0 along these axes returns a result.
            make_dummy_calls_to_free_axes: call the other workers too, with None for every piece; they return no result.
            common_kwargs: keyword arguments that are the same for all workers, including dummy calls.
            kwargs: a nested sequence for each keyword argument, as for `args`.

        Returns:
            The call, a `MultiWorkerFuture` of the results by rank; `get_all_worker_results` fetches them.

        Raises:
            ValueError: an axis does not exist or is both sharded and replicated; there are too few or too many pieces,
                at any depth; or a name is in both `kwargs` and `common_kwargs`.
            AttributeError, TypeError, WorkerFailureError, WorkerGroupError: as `run_single_worker_single_data` does.
        """
        sharding = self._target.sharding
        plan = sharding.plan(
            in_sharded_axes=in_sharded_axes or (),
            replicate_on_axes=replicate_on_axes or (),
            output_is_replicated=output_is_replicated or (),
            make_dummy_calls_to_free_axes=make_dummy_calls_to_free_axes,
        )
        recipients = Recipients(plan.called.tolist(), plan.returned.tolist(), plan.answers.tolist())
        index = plan.piece.tolist()

        def column(nested: Any) -> Column:
            return Column(plan.pieces(nested), index)

        return self._dispatch(sharding, method_name, recipients, args, kwargs, column, common_kwargs, queues=True)

    def get_all_worker_results(
        self, future_bundle: MultiWorkerFuture | Sequence[Any], return_generators_as_proxies: bool = False
    ) -> list[Any]:
        """Wait for a call and fetch its results, and nothing else; new code uses `Call.result`.

        Args:
            future_bundle: the value that a classic method returned.
            return_generators_as_proxies: return generators as they are instead of collecting their items.

        Returns:
            The results in order, as a flat list.

        Raises:
            CallTimeoutError: a worker has not finished by the deadline of the `Call`, or, for ObjectRefs, within the
                group's `Timeouts.call_s` from now.
            WorkerFailureError: a worker was lost.
            Exception: a worker's own exception, with its type and a note for each failing rank.
        """
        with short_traceback():
            call = as_call(self._target.core, self, future_bundle)
            return call.get_results(return_generators_as_proxies=return_generators_as_proxies)

    def _dispatch(
        self,
        sharding: NamedSharding,
        method_name: str,
        recipients: Recipients,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        column: Callable[[Any], Column],
        common_kwargs: Mapping[str, Any] | None = None,
        *,
        queues: bool = False,
    ) -> Call:
        """Send a call. With `queues`, one of an event loop that has to wait is sent later; otherwise it is refused."""
        # The deaths that a user's `ray.get` of earlier futures has met: then this call raises or repairs them.
        core = self._target.core
        note_known_dead(core, recipients.called)
        common = common_kwargs or {}
        method = core.worker_class.method(method_name)
        if both := sorted(set(kwargs) & set(common)):
            raise ValueError(f"arguments {both} are given both per worker and in common_kwargs")
        named = {**kwargs, **{name: replicate(value) for name, value in common.items()}}
        call = prepare_call(core, method, recipients, args, named, CallOptions(), column=column, sharding=sharding)
        return send_call(core, self, call, queues=queues)
