# SPDX-License-Identifier: Apache-2.0
"""Starts a group of workers with one call, with the reservation and the Ray that it needs."""

import contextlib
import difflib
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any, NoReturn

import ray

from fairlead_placement import Node, PlacementError, RayVirtualCluster, ResourceInsufficientError, init_ray
from fairlead_placement.extension import connection, count_bundles, read_nodes
from fairlead_sharding import NamedSharding
from fairlead_venvs import VenvSpec

from ._group import RayWorkerGroup
from ._model import Restart
from ._options import Timeouts, read_option
from ._remote.describe import undecorate
from ._start.environment import check_env_vars, choose_python
from ._start.worker_class import ClassLike, RayWorkerBuilder
from ._status import check_seconds
from ._world import Deadline

# How the options of other libraries begin that could be taken for axes.
_NO_AXES = ("num_", "gpu", "cpu", "max_", "memory", "nodes", "retries")
# The connection to the Ray that a group has started and ends, and what that group holds of it.
_own_ray: tuple[object, Mapping[str, float]] = (None, {})


def launch(
    worker: RayWorkerBuilder | ClassLike,
    /,
    *positional: NoReturn,
    workers: int | None = None,
    init_args: list[Any] | tuple[Any, ...] = (),
    init_kwargs: dict[str, Any] | None = None,
    address: str | None = None,
    gpus_per_worker: float = 0,
    cpus_per_worker: int = 1,
    python: str | VenvSpec | None = None,
    env_vars: Mapping[str, str] | None = None,
    restart: Restart | None = None,
    name_prefix: str = "",
    timeout_s: float = 600.0,
    **axes: int,
) -> RayWorkerGroup:
    """Start a group of workers, with everything that it needs.

    The workers run on the Ray that this process is connected to, or else on the cluster that `address` or `RAY_ADDRESS`
    names. If there is neither, Ray is started on this machine, with the CPUs of the machine, or of the workers if they
    need more. Call `init_ray(num_cpus=...)` first if several groups are to run beside each other. Each node gets the
    same number of workers, and as few nodes as possible are used.

    Args:
        worker: a class, a `@ray.remote` class, the full name of a class, or a `RayWorkerBuilder` with the arguments of
            the constructor.
        workers: the number of workers, instead of axes.
        init_args: the positional arguments of the constructor.
        init_kwargs: the keyword arguments of the constructor.
        address: the `host:port` of a Ray cluster; "local" for a new one on this machine.
        gpus_per_worker: the GPUs of each worker, or with 0.5, say, the part of one that workers share.
        cpus_per_worker: the CPUs of each worker.
        python: the Python of the workers, as for `RayWorkerGroup`.
        env_vars: the environment variables of the workers, as for `RayWorkerGroup`.
        restart: how lost workers are restarted, as for `RayWorkerGroup`.
        name_prefix: the first part of the workers' names; the class's name if empty.
        timeout_s: the seconds that the reservation and all constructors together may take.
        axes: the axes over the ranks and their sizes, the last one fastest: `dp=2, tp=4` starts 8 workers.

    Returns:
        The group. Its `shutdown`, or the end of its `with` block, also releases the reservation, and stops the Ray or
        the connection that was made here.

    Raises:
        TypeError, ValueError: an argument is not valid; nothing has been started.
        PlacementError: the cluster of `address` cannot be reached.
        ResourceInsufficientError: the cluster cannot hold the workers; or not beside the group that has started this
            Ray, and ends it.
        PlacementTimeoutError: others held what the workers need until `timeout_s`.
        WorkerStartError: a worker did not start. Nothing of the group is left.

    Use `init_ray`, `RayVirtualCluster` and `RayWorkerGroup` themselves, as this function does, for several groups on
    one reservation, for other accelerators, for a layout of your own, and for groups that restart or change size.

    >>> with launch("collections.Counter", dp=2, tp=2, address="local") as group:
    ...     group.sharding_annotations.shape, group.call("total").result()
    ({'dp': 2, 'tp': 2}, [0, 0, 0, 0])
    """
    if positional:
        raise TypeError(f"launch takes the class and then options by name, such as workers=2, got {positional}")
    init_kwargs = {} if init_kwargs is None else init_kwargs
    _check_start(worker, init_args, init_kwargs, timeout_s, gpus_per_worker)
    builder = worker if isinstance(worker, RayWorkerBuilder) else RayWorkerBuilder(worker, *init_args, **init_kwargs)
    sharding = NamedSharding.from_shape(**_check_axes(worker, workers, axes))
    restart = read_option("restart", restart, Restart)
    python = choose_python(python, builder.ray_actor_class_fqn)
    env_vars = check_env_vars(env_vars)
    deadline, gpus = Deadline.after(timeout_s), {"GPU": gpus_per_worker} if gpus_per_worker else {}
    # One that is never reserved: it refuses wrong options before Ray is started.
    RayVirtualCluster([sharding.size], accelerators=gpus, cpus_per_worker=cpus_per_worker)
    with contextlib.ExitStack() as made:
        starts_ray = not ray.is_initialized()
        if starts_ray:
            made.callback(ray.shutdown)
        _connect(address, sharding.size * cpus_per_worker)
        bundle, nodes = {"CPU": float(cpus_per_worker), **gpus}, read_nodes()
        cluster = RayVirtualCluster(
            _count_for_each_node(sharding.size, [count_bundles(bundle, node.total) for node in nodes]),
            name=name_prefix or builder.ray_actor_class_fqn.rpartition(".")[2],
            accelerators=gpus,
            cpus_per_worker=cpus_per_worker,
            reserve_timeout_s=deadline.left() or 0.0,
        )
        made.enter_context(_naming_options(sharding.shape, cpus_per_worker, gpus_per_worker))
        _check_room(cluster, bundle, nodes)
        made.enter_context(cluster)
        if starts_ray:
            global _own_ray
            _own_ray = connection(), {name: amount * sharding.size for name, amount in bundle.items()}
        group = _LaunchedGroup(
            cluster,
            builder,
            name_prefix=name_prefix,
            sharding_annotations=sharding,
            env_vars=env_vars,
            python=python,
            restart=restart,
            timeouts=Timeouts(start_s=deadline.left() or 0.001),
        )
        group.made = made.pop_all()
    return group


def _connect(address: str | None, cpus: int) -> None:
    """Attach to the cluster that is named, or else start a Ray with the CPUs of the machine, or `cpus` if more."""
    if ray.is_initialized() or (address or os.environ.get("RAY_ADDRESS") or "local") != "local":
        init_ray(address=address)
    else:
        init_ray(address="local", num_cpus=max(cpus, len(os.sched_getaffinity(0))))


class _LaunchedGroup(RayWorkerGroup):
    """A group that ends what was made for it: its reservation, and its Ray."""

    made = contextlib.ExitStack()

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = 30.0, force: bool = False) -> bool:
        try:
            return super().shutdown(cleanup_method, timeout, force)
        finally:
            self.made.close()


_LaunchedGroup.__name__ = _LaunchedGroup.__qualname__ = RayWorkerGroup.__name__  # as Python's own errors name it


@contextlib.contextmanager
def _naming_options(axes: Mapping[str, int], cpus: int, gpus: float) -> Iterator[None]:
    """Name the options of `launch` in the error of a reservation."""
    try:
        yield
    except PlacementError as error:
        each = f"cpus_per_worker={cpus}" + (f" and gpus_per_worker={gpus:g} (0 needs no GPU)" if gpus else "")
        sizes = " x ".join(f"{axis}={size}" for axis, size in axes.items())
        error.add_note(
            f"launch requested {math.prod(axes.values())} worker(s) ({sizes}) with {each} each: request fewer or "
            "smaller ones, or wait longer for others (timeout_s). For wait_for_nodes_s, make a RayVirtualCluster with "
            "it, and a RayWorkerGroup on it."
        )
        raise


def _check_room(cluster: RayVirtualCluster, bundle: Mapping[str, float], nodes: Sequence[Node]) -> None:
    """Refuse workers that have no room beside the group that ends this Ray: waiting for that group would be in vain."""
    on, held = _own_ray
    if on is None or on is not connection():
        return
    left = [{name: amount - held.get(name, 0) for name, amount in node.total.items()} for node in nodes]
    if sum(count_bundles(bundle, amounts) for amounts in left) < cluster.world_size():
        cpus = sum(node.total["CPU"] for node in nodes)
        raise ResourceInsufficientError(
            f"An earlier launch of this process has started this Ray, with {cpus:g} CPU. Its group holds "
            f"{held['CPU']:g} of them, and ends this Ray when it is shut down, so {cluster.world_size()} more workers "
            "would never have room. Call init_ray(num_cpus=...) before the first launch, or start smaller groups.",
            cluster.explain(),
        )


def _check_axes(worker: object, workers: int | None, axes: Mapping[str, int]) -> Mapping[str, int]:
    """Return the axes over the workers; refuse arguments of the constructor, and options that `launch` lacks."""
    options = [name for name in signature(launch).parameters if name not in ("worker", "positional", "axes")]
    target: Any = worker.worker if isinstance(worker, RayWorkerBuilder) else worker
    cls = None if isinstance(target, str) else undecorate(target)
    for name, size in axes.items():
        if cls is not None and name in _constructor_parameters(cls):
            given = f"RayWorkerBuilder({cls.__name__}, {name}={size!r})"
            remedy = given if isinstance(worker, RayWorkerBuilder) else f"init_kwargs={{{name!r}: {size!r}}}"
            raise TypeError(f"{name} is a parameter of {cls.__name__}.__init__: pass {remedy}")
        is_size = isinstance(size, int) and not isinstance(size, bool)
        kinds = (RayVirtualCluster, RayWorkerGroup, Restart, Timeouts)
        owner = [kind.__name__ for kind in kinds if name in signature(kind).parameters]
        if near := difflib.get_close_matches("timeout_s" if "timeout" in name else name, options, 1, 0.75):
            hint = f". Did you mean {near[0]}?"
        elif owner:
            hint = f": give it to {owner[0]}. See the docstring of launch."
        elif name.startswith(_NO_AXES):
            hint = f". Its options are {', '.join(options)}; call an axis otherwise."
        elif not is_size:
            hint = f", and {name}={size!r} is not an axis with its size, which is a whole number of workers."
        else:
            continue
        raise TypeError(f"launch has no option {name!r}{hint}")
    if (workers is None) is (not axes):
        raise ValueError("launch needs the number of workers, as axes (dp=2, tp=2) or as workers=4, and not both")
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise ValueError(f"workers must be a whole number that is at least 1, got {workers!r}")
    return axes if workers is None else {"worker": workers}


def _constructor_parameters(cls: type) -> Collection[str]:
    try:
        parameters = signature(cls).parameters
    except (TypeError, ValueError):
        return ()
    return [name for name in parameters if name not in ("args", "kwargs")]


def _check_start(worker: object, init_args: object, init_kwargs: object, timeout_s: object, gpus: object) -> None:
    """Refuse arguments of a constructor that are not in a list and a dict, and numbers that are none."""
    for name, value, kinds in (("init_args", init_args, (list, tuple)), ("init_kwargs", init_kwargs, (dict,))):
        if not isinstance(value, kinds):
            raise TypeError(f"{name} must be a {' or '.join(kind.__name__ for kind in kinds)}, got {value!r}")
    if isinstance(worker, RayWorkerBuilder) and (init_args or init_kwargs):
        raise TypeError("launch got a RayWorkerBuilder and init_args or init_kwargs: give the arguments to the builder")
    check_seconds("timeout_s", timeout_s)
    if isinstance(gpus, bool) or not isinstance(gpus, (int, float)) or gpus < 0:
        raise ValueError(f"gpus_per_worker must be a number of at least 0, got {gpus!r}")


def _count_for_each_node(workers: int, rooms: Sequence[int]) -> list[int]:
    """Return the largest equal parts of the workers that nodes with these rooms hold; one part if none fits.

    >>> _count_for_each_node(16, [8, 8, 4]), _count_for_each_node(12, [8, 8]), _count_for_each_node(5, [4])
    ([8, 8], [6, 6], [5])
    """
    for parts in (count for count in range(1, workers + 1) if workers % count == 0):
        if sum(room // (workers // parts) for room in rooms) >= parts:
            return [workers // parts] * parts
    return [workers]
