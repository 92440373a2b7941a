# SPDX-License-Identifier: Apache-2.0
"""The classic calling methods: thin layers over one planner and one submitter."""

from collections.abc import Mapping, Sequence
from typing import Any

from ray import ObjectRef

from fairlead_sharding import NamedSharding

from .call import Call
from .errors import short_traceback
from .plan import Axes, Column, as_axes
from .results import MultiWorkerFuture, fetched

__all__ = ["ClassicCalls"]


class ClassicCalls:
    """What `RayWorkerGroup` offers beside `call`.

    All arguments are checked before the first worker is called: the method's name and parameters, axes, lengths. Small
    plain values travel with the call, everything else is stored once however many workers get it; ObjectRefs are
    passed through.
    """

    sharding_annotations: NamedSharding

    def _dispatch(
        self,
        method: str,
        called: list[int],
        args: Sequence[Column],
        kwargs: Mapping[str, Column],
        *,
        returned: list[int],
        answers: list[bool] | None = None,
    ) -> Call:
        raise NotImplementedError

    def _note_submitted(self, call: Call) -> list[Any]:
        raise NotImplementedError

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int, *args: Any, **kwargs: Any
    ) -> ObjectRef[Any]:
        """Call a method of one worker.

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
        size = self.sharding_annotations.size
        if isinstance(worker_idx, bool) or not isinstance(worker_idx, int):
            raise TypeError(f"worker_idx must be an int, got {worker_idx!r}")
        if not 0 <= worker_idx < size:
            raise IndexError(f"worker_idx {worker_idx} is out of range: the group has ranks 0 to {size - 1}")
        call = self._dispatch(method_name, [worker_idx], *_same(args, kwargs), returned=[worker_idx])
        (future,) = self._note_submitted(call)
        return future

    def run_all_workers_single_data(
        self, method_name: str, *args: Any, run_rank_0_only_axes: Axes = None, **kwargs: Any
    ) -> list[ObjectRef[Any]]:
        """Call a method of all workers with the same arguments.

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
        ranks = self._leaders(run_rank_0_only_axes)
        return self._note_submitted(self._dispatch(method_name, ranks, *_same(args, kwargs), returned=ranks))

    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *args: Sequence[Any],
        run_rank_0_only_axes: Axes = None,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Sequence[Any],
    ) -> list[ObjectRef[Any]]:
        """Call a method of all workers, each with arguments of its own.

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
        ranks = self._leaders(run_rank_0_only_axes)

        def column(what: str, values: Any) -> Column:
            if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__len__"):
                raise TypeError(f"{what} must be a list with a value per worker called, got {type(values).__name__}")
            if len(values) != len(ranks):
                raise ValueError(f"{what} has {len(values)} values, but {len(ranks)} workers are called")
            return Column([values[at] for at in range(len(ranks))], range(len(ranks)))

        columns = [column(f"positional argument {at}", values) for at, values in enumerate(args)]
        named = {name: column(f"argument {name!r}", values) for name, values in kwargs.items()}
        named = _with_common(named, common_kwargs)
        return self._note_submitted(self._dispatch(method_name, ranks, columns, named, returned=ranks))

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
        """Call a method of workers with the piece of the data that their coordinates ask for.

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
        plan = self.sharding_annotations.plan(
            in_sharded_axes=as_axes(in_sharded_axes),
            replicate_on_axes=as_axes(replicate_on_axes),
            output_is_replicated=as_axes(output_is_replicated),
            make_dummy_calls_to_free_axes=make_dummy_calls_to_free_axes,
        )
        index = plan.piece.tolist()

        def column(what: str, nested: Any) -> Column:
            try:
                return Column(plan.pieces(nested), index)
            except (TypeError, ValueError) as error:
                error.add_note(f"in {what} of {method_name!r}")
                raise

        columns = [column(f"positional argument {at}", nested) for at, nested in enumerate(args)]
        named = {name: column(f"argument {name!r}", nested) for name, nested in kwargs.items()}
        call = self._dispatch(
            method_name,
            plan.called.tolist(),
            columns,
            _with_common(named, common_kwargs),
            answers=plan.answers.tolist(),
            returned=plan.returned.tolist(),
        )
        self._note_submitted(call)
        return call

    def get_all_worker_results(
        self, future_bundle: MultiWorkerFuture | Sequence[Any], return_generators_as_proxies: bool = False
    ) -> list[Any]:
        """Wait for a call and fetch its results, and nothing else.

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
            if isinstance(future_bundle, MultiWorkerFuture):
                return future_bundle.get_results(self, return_generators_as_proxies)  # type: ignore[arg-type]
            return fetched(future_bundle, group=self, proxies=return_generators_as_proxies)  # type: ignore[arg-type]

    def _leaders(self, axes: Axes) -> list[int]:
        sharding = self.sharding_annotations
        return sorted(sharding.layout.ravel()[sharding.leaders(*as_axes(axes))].tolist())


def _same(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Column], dict[str, Column]]:
    return [Column([value]) for value in args], {name: Column([value]) for name, value in kwargs.items()}


def _with_common(named: dict[str, Column], common: Mapping[str, Any] | None) -> dict[str, Column]:
    common = common or {}
    both = sorted(set(named) & set(common))
    if both:
        raise ValueError(f"arguments {both} are given both per worker and in common_kwargs")
    return {**named, **{name: Column([value]) for name, value in common.items()}}
