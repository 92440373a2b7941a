# SPDX-License-Identifier: Apache-2.0
"""The calling methods of the original system: thin layers over the planning and sending of every call."""

from collections.abc import Mapping, Sequence
from typing import Any

from fairlead_sharding import NamedSharding

from .call import Call
from .dispatch import dispatch
from .execution import Execution
from .plan import Axes, Column, as_axes
from .results import ClassicFutures, MultiWorkerFuture, fetch, fetch_bundle
from .sender import Sender


class ClassicCalls:
    """Makes the classic calls of a group; `RayWorkerGroup` says what each of them does.

    The `owner` that they take is the group, which must live as long as somebody waits for a call.

    Args:
        sender: of the group.
        sharding: the axes over its ranks.
    """

    def __init__(self, sender: Sender, sharding: NamedSharding) -> None:
        self._sender = sender
        self._sharding = sharding
        self._futures = ClassicFutures(sender)

    def call_one(self, owner: object, name: str, rank: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call one worker; return its future."""
        size = self._sharding.size
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise TypeError(f"worker_idx must be an int, got {rank!r}")
        if not 0 <= rank < size:
            raise IndexError(f"worker_idx {rank} is out of range: the group has ranks 0 to {size - 1}")
        columns, named = _replicate(args, kwargs)
        (future,) = self._dispatch(owner, name, [rank], columns, named, returned=[rank]).futures
        return future

    def call_all(
        self, owner: object, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, leaders_on: Axes
    ) -> list[Any]:
        """Call all workers, or those at coordinate 0 of some axes, with the same arguments; return the futures."""
        ranks = self._leaders(leaders_on)
        columns, named = _replicate(args, kwargs)
        return self._dispatch(owner, name, ranks, columns, named, returned=ranks).futures

    def call_each(
        self,
        owner: object,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        leaders_on: Axes,
        common: Mapping[str, Any] | None,
    ) -> list[Any]:
        """Do the same, each worker with arguments of its own; return the futures."""
        ranks = self._leaders(leaders_on)

        def column(what: str, values: Any) -> Column:
            if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__len__"):
                raise TypeError(f"{what} must be a list with a value per worker called, got {type(values).__name__}")
            if len(values) != len(ranks):
                raise ValueError(f"{what} has {len(values)} values, but {len(ranks)} workers are called")
            return Column([values[at] for at in range(len(ranks))], range(len(ranks)))

        columns = [column(f"positional argument {at}", values) for at, values in enumerate(args)]
        named = {key: column(f"argument {key!r}", values) for key, values in kwargs.items()}
        return self._dispatch(owner, name, ranks, columns, _with_common(named, common), returned=ranks).futures

    def call_sharded(
        self,
        owner: object,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        sharded: Axes,
        replicated: Axes,
        output_replicated: Axes,
        dummy_calls: bool,
        common: Mapping[str, Any] | None,
    ) -> Call:
        """Call workers with the pieces of the data at their coordinates."""
        plan = self._sharding.plan(
            in_sharded_axes=as_axes(sharded),
            replicate_on_axes=as_axes(replicated),
            output_is_replicated=as_axes(output_replicated),
            make_dummy_calls_to_free_axes=dummy_calls,
        )
        index = plan.piece.tolist()

        def column(what: str, nested: Any) -> Column:
            try:
                return Column(plan.pieces(nested), index)
            except (TypeError, ValueError) as error:
                error.add_note(f"in {what} of {name!r}")
                raise

        columns = [column(f"positional argument {at}", nested) for at, nested in enumerate(args)]
        named = {key: column(f"argument {key!r}", nested) for key, nested in kwargs.items()}
        execution = self._dispatch(
            owner,
            name,
            plan.called.tolist(),
            columns,
            _with_common(named, common),
            answers=plan.answers.tolist(),
            returned=plan.returned.tolist(),
        )
        return Call(execution)

    def fetch(self, bundle: MultiWorkerFuture | Sequence[Any], *, proxies: bool) -> list[Any]:
        """Wait for a call and fetch its results."""
        if isinstance(bundle, Call):
            return bundle.get_results(return_generators_as_proxies=proxies)
        if isinstance(bundle, MultiWorkerFuture):
            return fetch_bundle(bundle, group=self._futures, proxies=proxies)
        return fetch(bundle, group=self._futures, proxies=proxies)

    def _leaders(self, axes: Axes) -> list[int]:
        sharding = self._sharding
        return sorted(sharding.layout.ravel()[sharding.leaders(*as_axes(axes))].tolist())

    def _dispatch(
        self,
        owner: object,
        name: str,
        ranks: list[int],
        args: Sequence[Column],
        kwargs: Mapping[str, Column],
        *,
        returned: list[int],
        answers: list[bool] | None = None,
    ) -> Execution:
        """Send a call, and note when its futures were made, which ObjectRefs do not say."""
        execution = dispatch(self._sender, owner, name, ranks, args, kwargs, returned=returned, answers=answers)
        self._futures.note(execution.futures, execution.method.name, execution.began)
        return execution


def _replicate(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Column], dict[str, Column]]:
    return [Column([value]) for value in args], {name: Column([value]) for name, value in kwargs.items()}


def _with_common(named: dict[str, Column], common: Mapping[str, Any] | None) -> dict[str, Column]:
    common = common or {}
    both = sorted(set(named) & set(common))
    if both:
        raise ValueError(f"arguments {both} are given both per worker and in common_kwargs")
    return {**named, **{name: Column([value]) for name, value in common.items()}}
