# SPDX-License-Identifier: Apache-2.0
"""What the workers of a group are made from: the first time, and each time one is started again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray import ObjectRef

from fairlead_sharding import NamedSharding

from .._arguments import Arguments, NotPicklableError
from .._builder import RayWorkerBuilder
from .._remote.process import mark_of
from .launch import WorkerPlan
from .worker_class import WorkerClass

__all__ = ["Recipe", "recipe_of"]


@dataclass(frozen=True)
class Recipe:
    """The constructor's arguments and the facts of all workers, stored once for as long as the group lives.

    Attributes:
        args: positional arguments of the constructor.
        kwargs: keyword arguments.
        target: what the class is loaded from.
        facts: what every worker is told, whatever its rank.
        token: identifies the group among all groups of all drivers.
        stored: the references that keep all of it in the store, and what they cost.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    target: Any
    facts: Mapping[str, Any]
    token: str
    stored: Arguments

    def start(
        self, actor: Any, plan: WorkerPlan, *, incarnation: int, master_port: int, configured: Arguments
    ) -> ObjectRef:
        """Have an actor make its worker; a ref of what it says of itself.

        Args:
            actor: its handle.
            plan: what it is to be.
            incarnation: how often its rank has been started before.
            master_port: the group's.
            configured: what stores the values that `configure_worker` adds, to be kept until the worker has started;
                the same for all that start together: it tells values by identity.
        """
        facts = {
            **self.facts,
            "rank": plan.place.rank,
            "name": plan.place.name,
            "coords": dict(plan.coords),
            "incarnation": incarnation,
            "tree": f"{mark_of(self.token, plan.place.rank)}{incarnation}",
            "env": {**plan.environment.variables, "MASTER_PORT": str(master_port)},
            "path": list(plan.environment.path),
        }
        more = {name: configured.prepared(value) for name, value in plan.init_kwargs.items()}
        # Nested, so that Ray leaves the references alone: the host fetches them once the environment is set.
        ref: ObjectRef = actor._fairlead_start.remote(facts, [self.target], list(self.args), {**self.kwargs, **more})
        return ref


def recipe_of(
    builder: RayWorkerBuilder, described: WorkerClass, sharding: NamedSharding, facts: Mapping[str, Any], *, token: str
) -> Recipe:
    """Store what all workers are made from.

    Raises:
        TypeError: an argument of the constructor cannot be pickled.
    """
    stored = Arguments()

    def argument(name: object, value: Any) -> Any:
        try:
            return stored.prepared(value)
        except NotPicklableError as error:
            raise TypeError(f"argument {name!r} of the constructor of {described.name!r}: {error}") from None

    layout: Any = sharding.to_dict()
    if "ranks" in layout:  # it grows with the group: stored, not sent to each worker
        layout = stored.prepared(layout)
    return Recipe(
        args=[argument(at, value) for at, value in enumerate(builder.args)],
        kwargs={name: argument(name, value) for name, value in builder.kwargs.items()},
        target=stored.prepared(described.target),
        facts={**facts, "world_size": sharding.size, "layout": layout},
        token=token,
        stored=stored,
    )
