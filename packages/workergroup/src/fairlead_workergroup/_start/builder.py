# SPDX-License-Identifier: Apache-2.0
"""The description of a worker: a user's class with its constructor arguments."""

import copy
from collections.abc import Sequence
from typing import Any, TypeAlias

import ray
from ray import ObjectRef
from ray.actor import ActorClass
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .._arguments import Arguments
from .._observe.head import read_placement_group
from ..exceptions import WorkerStartError
from .environment import worker_environment
from .options import check_concurrency, recursive_merge_options
from .worker_class import describe_class, full_name

START_S = 600.0

ClassLike: TypeAlias = str | type[Any] | ActorClass[Any]


class RayWorkerBuilder:
    """A worker class and the arguments of its constructor, for a group or for one worker at a time.

    Args:
        ray_actor_class_fqn: the full name of a class (then only the workers import it), a class, or a `@ray.remote`
            class. A class that workers cannot import, from `__main__` or a notebook, is shipped by value.
        args: positional arguments of its constructor.
        kwargs: keyword arguments of its constructor.

    Raises:
        TypeError, ValueError: the argument is neither a class nor the name of one.

    Attributes:
        ray_actor_class_fqn: the full name of the class.
        worker: the class as it was given.
        args: the positional arguments.
        kwargs: the keyword arguments.
        methods: the names that `with_methods` has added.

    >>> RayWorkerBuilder("collections.Counter", "abc").ray_actor_class_fqn
    'collections.Counter'
    """

    def __init__(self, ray_actor_class_fqn: ClassLike, *args: Any, **kwargs: Any) -> None:
        self.ray_actor_class_fqn: str = full_name(ray_actor_class_fqn)
        self.worker: ClassLike = ray_actor_class_fqn
        self.args = args
        self.kwargs = kwargs
        self.methods: tuple[str, ...] = ()

    def with_methods(self, *names: str) -> "RayWorkerBuilder":
        """Return a builder of the same worker with more methods, whose names begin with an underscore.

        Args:
            names: the methods of the class that can be called beside its public ones.
        """
        for name in names:
            if not name.startswith("_") or name.startswith(("__", "_fairlead_")):
                raise ValueError(f"with_methods names methods with one leading underscore, got {name!r}")
        builder = copy.copy(self)
        builder.methods = (*self.methods, *names)
        return builder

    def __repr__(self) -> str:
        return f"RayWorkerBuilder({self.ray_actor_class_fqn!r})"

    def create_worker_async(
        self,
        placement_group: PlacementGroup,
        placement_group_bundle_index: int,
        num_gpus: float,
        bundle_indices: tuple[int, Sequence[int]] | None = None,
        **extra_options: Any,
    ) -> tuple[ObjectRef[Any], Any]:
        """Start one worker in a bundle, outside any group.

        Args:
            placement_group: a group that Ray has placed.
            placement_group_bundle_index: the bundle.
            num_gpus: the worker's share of the bundle's GPUs, which `configure_worker` can override.
            bundle_indices: passed to `configure_worker`.
            extra_options: Ray options, merged over those of the class.

        Returns:
            A ref of the worker's handle, which is ready when its constructor has finished, or holds the error of
            that; and the handle at once. It has the class's own methods.

        Raises:
            TypeError, ValueError: a worker cannot have this class or these options.
            WorkerStartError: the class cannot be inspected on its node.
        """
        node_ids = read_placement_group(placement_group)["bundles_to_node_id"]
        node_id = node_ids[placement_group_bundle_index]
        ask = {
            "num_gpus": num_gpus,
            "bundle_indices": bundle_indices,
            "num_gpus_per_node": sum(other == node_id for other in node_ids.values()),
        }
        described = describe_class(
            self.worker,
            self.methods,
            asks=[ask],
            node_id=node_id,
            runtime_env=extra_options.get("runtime_env"),
            timeout_s=START_S,
        )
        resources, env_vars, init_kwargs, overrides = described.configuration(0)
        own = {"num_gpus": num_gpus, **resources, **({"runtime_env": overrides} if overrides else {})}
        options = recursive_merge_options(recursive_merge_options(described.options, own), extra_options)
        check_concurrency(options, concurrent=False)
        environment = worker_environment(configured=env_vars)
        if environment.loader_variables:
            loader = {"runtime_env": {"env_vars": dict(environment.loader_variables)}}
            options = recursive_merge_options(options, loader)
        options.setdefault("num_cpus", 1)
        handle = described.actor_class.options(
            **options,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group, placement_group_bundle_index, placement_group_capture_child_tasks=True
            ),
        ).remote()
        arguments = Arguments()
        facts = {"env": dict(environment.variables), "path": list(environment.path)}
        ready = handle._fairlead_start.remote(
            facts,
            [arguments.prepare(described.target)],
            [arguments.prepare(value) for value in self.args],
            {name: arguments.prepare(value) for name, value in {**self.kwargs, **init_kwargs}.items()},
        )
        return handle._fairlead_give.remote(handle, ready), handle

    def __call__(
        self,
        placement_group: PlacementGroup,
        placement_group_bundle_index: int,
        num_gpus: float,
        bundle_indices: tuple[int, Sequence[int]] | None = None,
        **extra_options: Any,
    ) -> Any:
        """Start one worker as `create_worker_async` does, and wait for its constructor.

        Returns:
            The actor handle.

        Raises:
            TypeError, ValueError: as `create_worker_async` does.
            WorkerStartError: as `create_worker_async` does; or the constructor has not finished within 600 s, and the
                worker has been killed.
            Exception: the constructor's own exception.
        """
        ready, handle = self.create_worker_async(
            placement_group, placement_group_bundle_index, num_gpus, bundle_indices, **extra_options
        )
        if not ray.wait([ready], timeout=START_S)[0]:
            ray.kill(handle)
            raise WorkerStartError(
                f"the constructor of {self.ray_actor_class_fqn} has not finished after {START_S:g} s: either it takes "
                f"longer, or bundle {placement_group_bundle_index} has no room for the worker. Look at "
                "`ray.util.placement_group_table()`"
            )
        ray.get(ready)
        return handle
