# SPDX-License-Identifier: Apache-2.0
"""Configurations of runs: frozen values that are checked when they are made."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar, Self

import ray.util.accelerators
from ray.runtime_env import RuntimeEnv

from fairlead_placement import Node, extension

from ._slices import SliceInfo, TpuType, assess_slices, tpu_type

MEGASCALE_DEFAULT_PORT: int = 8081
# Ray's names of accelerators, by their names in lower case.
_MODELS = {name.lower(): name for name in vars(ray.util.accelerators).values() if isinstance(name, str)}


@dataclass(frozen=True, kw_only=True)
class _RunOptions:
    """The options of all configurations; `TpuAcceleratorConfig` describes them."""

    execution_env: Mapping[str, Any] = field(default_factory=dict, hash=False)
    scale_timeout_s: float = 600.0
    replace_timeout_s: float = 86_400.0
    grace_s: float = 2.0
    flatten: bool = True
    max_retries_preemption: int = 1_000_000
    max_retries_failure: int = 10

    def __post_init__(self) -> None:
        _check_int("max_retries_preemption", self.max_retries_preemption, 0)
        _check_int("max_retries_failure", self.max_retries_failure, 0)
        for name in ("scale_timeout_s", "replace_timeout_s", "grace_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number of seconds, got {value!r}.")
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} cannot be negative or infinite, got {value!r}.")
        if not isinstance(self.execution_env or {}, Mapping):
            raise TypeError(f"execution_env must be a runtime_env, which is a dict, got {self.execution_env!r}.")
        object.__setattr__(self, "execution_env", dict(self.execution_env or {}))
        RuntimeEnv(env_vars=self.env_vars)  # Ray's check of the variables

    @property
    def env_vars(self) -> Mapping[str, str]:
        """The variables in `execution_env`."""
        return self.execution_env.get("env_vars") or {}

    def with_environment_variables(self, env_vars: Mapping[str, str] | None = None, /, **more: str) -> Self:
        """Return a copy with further variables, which override the present ones. Raises like the class."""
        merged = {**self.env_vars, **(env_vars or {}), **more}
        return dataclasses.replace(self, execution_env={**self.execution_env, "env_vars": merged})


@dataclass(frozen=True)
class TpuAcceleratorConfig(_RunOptions):
    """Whole TPU slices, and how to run on them.

    Args:
        tpu_version: the type of a slice, such as "v4-16".
        pod_count: the number of slices; a list of allowed numbers means the largest that is free.
        topology: the topology, such as "2x2x2"; None for any.
        chips_per_vm: the number of chips of each host; None for the usual number of the type.
        execution_env: a Ray runtime_env; its `env_vars` are set before any of your modules is imported.
        cpu_count: the number of CPUs to reserve on each host.
        scale_timeout_s: seconds to wait for the first slices, and for the largest allowed number of them.
        replace_timeout_s: seconds to wait for the replacement of a lost slice, while the healthy slices stay reserved.
        grace_s: seconds to wait after a first error for a preemption that explains it.
        flatten: return one list of results instead of one list per slice.
        max_retries_preemption: how often to repeat a run after slices were lost.
        max_retries_failure: how often to repeat a run after the function failed, or an accelerator did not start.
        megascale_port: the port of the coordinator of several slices; None for `COORD_PORT`, or 8081.
        lock_files: lock files of libtpu. A host waits up to a minute for the process that has locked one.
        type: another name of `tpu_version`.
        preemptible: has no effect, because a preemption is noticed on any slice.

    Attributes:
        slice_type: the type of each slice, with its numbers of hosts and chips.

    Raises:
        TypeError: an option does not exist or is given by two names, or a value has a wrong type.
        ValueError: a type, a topology or a number does not exist.
    """

    tpu_version: str = "v4-16"
    pod_count: int | Sequence[int] = 1
    topology: str | None = field(default=None, kw_only=True)
    chips_per_vm: int | None = field(default=None, kw_only=True)
    cpu_count: int = field(default=2, kw_only=True)
    megascale_port: int | None = field(default=None, kw_only=True)
    lock_files: tuple[str, ...] = field(default=("/tmp/libtpu_lockfile",), kw_only=True)
    slice_type: TpuType = field(init=False, repr=False, compare=False)
    type: InitVar[str | None] = field(default=None, kw_only=True)
    preemptible: InitVar[bool] = field(default=False, kw_only=True)

    def __post_init__(self, type: str | None, preemptible: bool) -> None:
        super().__post_init__()
        _set_by_alias(self, "tpu_version", "type", type)
        kind = tpu_type(self.tpu_version, topology=self.topology, chips_per_vm=self.chips_per_vm)
        object.__setattr__(self, "slice_type", kind)
        object.__setattr__(self, "pod_count", _normalize_sizes(self.pod_count))
        object.__setattr__(self, "lock_files", tuple(self.lock_files))
        _check_int("cpu_count", self.cpu_count, 1)
        if self.megascale_port is not None and not 1 <= self.megascale_port <= 65535:
            raise ValueError(f"megascale_port must be a port, 1 to 65535, got {self.megascale_port!r}.")

    @property
    def kind(self) -> str:
        """The canonical name of the type, such as "v4-16"."""
        return self.slice_type.name

    @property
    def sizes(self) -> tuple[int, ...]:
        """The allowed numbers of slices, ascending."""
        return (self.pod_count,) if isinstance(self.pod_count, int) else tuple(self.pod_count)

    def find(self, nodes: Sequence[Node]) -> dict[str, SliceInfo | str]:
        """Return the free slices among nodes, or why they are not free, in the order of their names."""
        places = {name: place for name, (place, _) in assess_slices(nodes, self.slice_type).items()}
        free = {node.node_id: node.free for node in nodes}
        for name, place in places.items():
            if isinstance(place, SliceInfo):
                bundles = [(self.bundle(place, worker), node_id) for worker, node_id in enumerate(place.node_ids)]
                room = [extension.count_bundles(bundle, free[node_id]) for bundle, node_id in bundles]
                if busy := ", ".join(str(worker) for worker, count in enumerate(room) if not count):
                    places[name] = f"somebody else uses worker {busy}"
        return places

    def bundle(self, place: SliceInfo | None, worker: int) -> dict[str, float]:
        """Return what to reserve on a host of a slice: all its chips and, on worker 0, the lock of the slice.

        None stands for any slice of this type.
        """
        head = f"TPU-{self.kind}-head" if place is None else place.head_resource
        return {**self.request(place), **({head: 1.0} if worker == 0 and head else {})}

    def request(self, place: SliceInfo | None) -> dict[str, float]:
        """Return what a process requests of its bundle."""
        chips = self.slice_type.chips_per_host if place is None else place.num_accelerators_per_host
        return {"CPU": float(self.cpu_count), "TPU": float(chips)}


class _WorkersConfig(_RunOptions):
    """Equal workers on any hosts of the cluster, which together stand for one slice."""

    worker_count: int
    kind: ClassVar[str]
    sizes: ClassVar[tuple[int, ...]] = (1,)
    # The field that has the amount of each requested resource.
    _requested: ClassVar[Mapping[str, str]]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (*self._requested.values(), "worker_count"):
            _check_int(name, getattr(self, name), 1)

    def find(self, nodes: Sequence[Node]) -> dict[str, SliceInfo | str]:
        """Return what stands for a slice: all workers, on the first nodes with room for them; or what is lacking."""
        count, bundle = self.worker_count, self.bundle(None, 0)
        chosen: list[Node] = []
        for node in nodes:
            chosen += [node] * min(extension.count_bundles(bundle, node.free), count - len(chosen))
        if len(chosen) < count:
            each = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
            return {self.kind: f"room for {len(chosen)} of {count} workers of {each} each"}
        ids, ips = tuple(node.node_id for node in chosen), tuple(node.ip for node in chosen)
        return {self.kind: SliceInfo(self.kind, count, ips[0], int(bundle.get("GPU", 0)), ids, ips, self.kind)}

    def bundle(self, place: SliceInfo | None, worker: int) -> dict[str, float]:
        """Return what to reserve for a worker."""
        return self.request(place)

    def request(self, place: SliceInfo | None) -> dict[str, float]:
        """Return what a process requests of its bundle."""
        return {name: float(getattr(self, amount)) for name, amount in self._requested.items()}


@dataclass(frozen=True)
class GpuAcceleratorConfig(_WorkersConfig):
    """Workers with GPUs on any hosts of the cluster, reserved and lost together as the hosts of a slice are.

    Args:
        device_count: the number of GPUs of each worker.
        gpu_model: the model, named as in Ray's `accelerator_type`, such as "H100", in any case; None for any.
        cpu_count: the number of CPUs of each worker.
        worker_count: the number of workers.
        count: another name of `device_count`.
        type: another name of `gpu_model`.

    The other arguments and the exceptions are those of `TpuAcceleratorConfig`.
    """

    device_count: int = 1
    gpu_model: str | None = None
    cpu_count: int = 1
    worker_count: int = 1
    count: InitVar[int | None] = field(default=None, kw_only=True)
    type: InitVar[str | None] = field(default=None, kw_only=True)
    kind: ClassVar[str] = "gpu"
    _requested: ClassVar[Mapping[str, str]] = {"CPU": "cpu_count", "GPU": "device_count"}

    def __post_init__(self, count: int | None, type: str | None) -> None:
        _set_by_alias(self, "device_count", "count", count)
        _set_by_alias(self, "gpu_model", "type", type)
        super().__post_init__()
        if not isinstance(self.gpu_model, str | None):
            raise TypeError(f"gpu_model must be a string such as 'H100', or None, got {self.gpu_model!r}.")
        object.__setattr__(self, "gpu_model", _MODELS.get((self.gpu_model or "").lower(), self.gpu_model))

    def bundle(self, place: SliceInfo | None, worker: int) -> dict[str, float]:
        """Return what to reserve for a worker."""
        # A node has 1 of its model. The small amount only restricts the worker to nodes of that model.
        model = {f"accelerator_type:{self.gpu_model}": 0.001} if self.gpu_model else {}
        return {**self.request(place), **model}


@dataclass(frozen=True)
class CpuAcceleratorConfig(_WorkersConfig):
    """Workers with CPUs only on any hosts of the cluster, reserved and lost together as the hosts of a slice are.

    Args:
        core_count: the number of CPUs of each worker.
        worker_count: the number of workers.

    The other arguments and the exceptions are those of `TpuAcceleratorConfig`.
    """

    core_count: int = 1
    worker_count: int = 1
    kind: ClassVar[str] = "cpu"
    _requested: ClassVar[Mapping[str, str]] = {"CPU": "core_count"}


AcceleratorConfigType = TpuAcceleratorConfig | GpuAcceleratorConfig | CpuAcceleratorConfig


def _set_by_alias(config: Any, name: str, alias: str, value: Any) -> None:
    """Set a field to the value that was given by another name of the field, if one was."""
    if value is None:
        return
    if (own := getattr(config, name)) not in (getattr(type(config), name), value):
        raise TypeError(f"{alias}={value!r} is another name of {name}={own!r}. Give one of them.")
    object.__setattr__(config, name, value)


def _check_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")


def _normalize_sizes(pod_count: int | Sequence[int]) -> int | tuple[int, ...]:
    """Check `pod_count`, and return it; a list as an ascending tuple without duplicates."""
    sizes = pod_count if isinstance(pod_count, (list, tuple, range, set, frozenset)) else (pod_count,)
    if not sizes:
        raise ValueError("pod_count is an empty list, which allows no number of slices.")
    for size in sizes:
        _check_int("pod_count, or each entry of its list,", size, 1)
    return pod_count if isinstance(pod_count, int) else tuple(sorted(set(sizes)))
