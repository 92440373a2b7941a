# SPDX-License-Identifier: Apache-2.0
"""What to run on, and how: frozen values, checked once."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from fairlead_placement import Node

from .._gangs import gather
from .._keywords import names_the_right_one
from .slices import Found, SliceInfo, find_slices
from .tpu_types import TpuType, tpu_type

__all__ = [
    "AcceleratorConfigType",
    "CpuAcceleratorConfig",
    "GpuAcceleratorConfig",
    "LOCK_FILE",
    "MEGASCALE_DEFAULT_PORT",
    "TpuAcceleratorConfig",
]

MEGASCALE_DEFAULT_PORT: int = 8081
# libtpu locks it for as long as its process lives.
LOCK_FILE = "/tmp/libtpu_lockfile"
_Config = TypeVar("_Config", bound="_Run")
_SECONDS = (
    "scale_timeout_s",
    "replace_timeout_s",
    "queue_timeout_s",
    "grace_s",
    "crash_grace_s",
    "healthy_after_s",
    "head_timeout_s",
)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What all configurations have in common; the attributes are described where they are used."""

    execution_env: Mapping[str, Any] | None = field(default=None, hash=False)
    scale_timeout_s: float = 600.0
    queue_timeout_s: float | None = None
    grace_s: float = 2.0
    flatten: bool = True
    max_retries_preemption: int = 1_000_000
    max_retries_failure: int = 10
    replace_timeout_s: float = 86_400.0
    crash_grace_s: float = 60.0
    healthy_after_s: float | None = 3600.0
    head_timeout_s: float = 30.0

    def _check(self) -> None:
        _at_least("max_retries_preemption", self.max_retries_preemption, 0)
        _at_least("max_retries_failure", self.max_retries_failure, 0)
        for name in _SECONDS:
            value = getattr(self, name)
            if value is None and name in ("queue_timeout_s", "healthy_after_s"):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} is a number of seconds, got {value!r}")
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} cannot be negative or infinite, got {value!r}")
        if not isinstance(self.execution_env or {}, Mapping):
            raise TypeError(f"execution_env is a runtime_env, a dict, got {self.execution_env!r}")
        for name, value in self.env_vars.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise TypeError(
                    f"execution_env['env_vars'] maps names to strings, got {name!r}: {value!r} "
                    f"({type(value).__name__}). Convert it: str(...)."
                )
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"execution_env['env_vars'] has {name!r}, which cannot be an environment variable")

    @property
    def env_vars(self) -> Mapping[str, str]:
        """The variables of `execution_env`."""
        variables = (self.execution_env or {}).get("env_vars") or {}
        if not isinstance(variables, Mapping):
            raise TypeError(f"execution_env['env_vars'] is a dict, got {variables!r}")
        return variables

    @property
    def runtime_env(self) -> dict[str, Any]:
        """All of `execution_env` but its variables, which reach the function another way."""
        return {name: value for name, value in (self.execution_env or {}).items() if name != "env_vars"}

    def with_environment_variables(self: _Config, env_vars: Mapping[str, str] | None = None, /, **more: str) -> _Config:
        """A copy with further variables, which override those there are.

        Raises:
            TypeError, ValueError: what cannot be an environment variable.

        >>> CpuAcceleratorConfig().with_environment_variables({"A": "1"}, B="2").env_vars
        {'A': '1', 'B': '2'}
        """
        merged = {**self.env_vars, **(env_vars or {}), **more}
        return dataclasses.replace(self, execution_env={**(self.execution_env or {}), "env_vars": merged})


@names_the_right_one
@dataclass(frozen=True)
class TpuAcceleratorConfig(_Run):
    """Whole TPU slices, and how to run on them.

    Args:
        tpu_version: type of a slice, such as "v4-16".
        pod_count: how many slices; a list of allowed numbers means the largest that is free.
        topology: such as "2x2x2"; any if None.
        chips_per_vm: chips of each host; None for what is usual for the type.
        execution_env: a Ray runtime_env; its `env_vars` are set before anything of the user's is imported.
        cpu_count: CPUs that are reserved on each host.
        resources: further resources that are reserved on each host, such as `{"memory": 2e9}` (bytes).
        scale_timeout_s: seconds to wait for the first slices, and for the largest allowed number of them.
        replace_timeout_s: seconds to wait for the replacement of a lost slice, while the healthy slices stay reserved.
        crash_grace_s: seconds after a failure within which the loss of one of its hosts makes it a preemption. When a
            process dies and no retry is left, `run` waits so long for that loss before it raises.
        healthy_after_s: seconds of running without a failure after which `max_retries_failure` is available in full
            again; None for never.
        head_timeout_s: seconds for which Ray's head may not answer before `HeadUnreachableError` ends a run or a call.
            Without its head Ray ends the process after 60 s (`RAY_gcs_rpc_server_reconnect_timeout_s`).
        queue_timeout_s: seconds that a run waits for the one before it in its pool; as long as it takes if None, not at
            all if 0.
        grace_s: seconds after a first error in which a preemption may show that explains it.
        flatten: one list of results instead of one per slice.
        max_retries_preemption: how often a run is repeated after slices were lost.
        max_retries_failure: how often it is repeated after the function failed.
        megascale_port: port of the coordinator of several slices; None for `COORD_PORT`, or 8081.
        lock_files: files that are removed on each host before a run, if nothing that lives holds them.

    Raises:
        TypeError: an option that does not exist, with the one that was meant; a value of a wrong type.
        ValueError: a type, topology or number that does not exist.

    >>> TpuAcceleratorConfig("v4-16", pod_count=2).hosts_per_slice
    2
    """

    tpu_version: str = "v4-16"
    pod_count: int | Sequence[int] = 1
    topology: str | None = field(default=None, kw_only=True)
    chips_per_vm: int | None = field(default=None, kw_only=True)
    cpu_count: int = field(default=2, kw_only=True)
    resources: Mapping[str, float] | None = field(default=None, kw_only=True, hash=False)
    megascale_port: int | None = field(default=None, kw_only=True)
    lock_files: tuple[str, ...] = field(default=(LOCK_FILE,), kw_only=True)

    def __post_init__(self) -> None:
        self._check()
        tpu_type(self.tpu_version, topology=self.topology, chips_per_vm=self.chips_per_vm)
        object.__setattr__(self, "pod_count", _sizes(self.pod_count))
        _at_least("cpu_count", self.cpu_count, 1)
        _resources(self.resources)
        object.__setattr__(self, "lock_files", tuple(self.lock_files))
        if self.megascale_port is not None and not 1 <= self.megascale_port <= 65535:
            raise ValueError(f"megascale_port is a port, 1 to 65535, got {self.megascale_port!r}")

    @property
    def slice_type(self) -> TpuType:
        """What a slice of it is."""
        return tpu_type(self.tpu_version, topology=self.topology, chips_per_vm=self.chips_per_vm)

    @property
    def kind(self) -> str:
        """What to call it: "v4-16"."""
        return self.slice_type.name

    @property
    def hosts_per_slice(self) -> int:
        """How many hosts each slice has."""
        return self.slice_type.hosts

    @property
    def sizes(self) -> tuple[int, ...]:
        """The allowed numbers of slices, ascending."""
        return (self.pod_count,) if isinstance(self.pod_count, int) else tuple(self.pod_count)

    def find(self, nodes: Sequence[Node], quarantined: Collection[str] = ()) -> Found:
        """The slices of it among nodes, those with quarantined hosts included: a slice cannot do without a host."""
        return find_slices(nodes, self.slice_type)

    def nominal(self) -> SliceInfo:
        """What any slice of it is like, for what has to be known before there is one."""
        kind = self.slice_type
        return SliceInfo("", kind.name, "", (), (), kind.chips_per_host, f"TPU-{kind.name}-head")

    def bundle(self, one: SliceInfo, worker: int) -> dict[str, float]:
        """What is reserved on a host of a slice: all its chips and, on worker 0, the slice's lock.

        >>> config = TpuAcceleratorConfig("v4-16")
        >>> config.bundle(config.nominal(), worker=0)
        {'CPU': 2.0, 'TPU': 4.0, 'TPU-v4-16-head': 1.0}
        """
        head = {one.head_resource: 1.0} if worker == 0 and one.head_resource else {}
        return {**self.request(one), **(self.resources or {}), **head}

    def request(self, one: SliceInfo) -> dict[str, float]:
        """What a process asks of its bundle."""
        return {"CPU": float(self.cpu_count), "TPU": float(one.num_accelerators_per_host)}


class _Gang(_Run):
    """Bundles of one kind, anywhere in the cluster, that stand for a slice.

    Attributes:
        kind: what to call it: "gpu" or "cpu".
    """

    worker_count: int
    kind: ClassVar[str]

    @property
    def hosts_per_slice(self) -> int:
        """How many workers it has."""
        return self.worker_count

    @property
    def sizes(self) -> tuple[int, ...]:
        """One: all workers together."""
        return (1,)

    def find(self, nodes: Sequence[Node], quarantined: Collection[str] = ()) -> Found:
        """Room for all workers on nodes that are not quarantined."""
        nodes = [node for node in nodes if node.node_id not in quarantined]
        return gather(nodes, self.bundle(self.nominal(), 0), self.worker_count, self.kind)

    def nominal(self) -> SliceInfo:
        """What it is like, for what has to be known before there is one."""
        return SliceInfo("", self.kind, "", (), (), 0)

    def bundle(self, one: SliceInfo, worker: int) -> dict[str, float]:
        """What is reserved for a worker."""
        return self.request(one)

    def request(self, one: SliceInfo) -> dict[str, float]:
        """What a process asks of its bundle."""
        raise NotImplementedError


@names_the_right_one
@dataclass(frozen=True)
class GpuAcceleratorConfig(_Gang):
    """Workers with GPUs, anywhere in the cluster, that are taken and lost together as the hosts of a slice are.

    Args:
        device_count: GPUs of each worker.
        gpu_model: as in Ray's `accelerator_type`, such as "H100"; any if None.
        cpu_count: CPUs of each worker.
        worker_count: how many workers.

    The other arguments, and what is raised, are those of `TpuAcceleratorConfig`.

    >>> GpuAcceleratorConfig(2, worker_count=4).hosts_per_slice
    4
    """

    device_count: int = 1
    gpu_model: str | None = None
    cpu_count: int = 1
    worker_count: int = 1
    kind: ClassVar[str] = "gpu"

    def __post_init__(self) -> None:
        self._check()
        for name in ("device_count", "cpu_count", "worker_count"):
            _at_least(name, getattr(self, name), 1)

    def bundle(self, one: SliceInfo, worker: int) -> dict[str, float]:
        """What is reserved for a worker."""
        # Nodes have one of their model; what a worker takes of it only says where it may be.
        model = {f"accelerator_type:{self.gpu_model}": 0.001} if self.gpu_model else {}
        return {**self.request(one), **model}

    def request(self, one: SliceInfo) -> dict[str, float]:
        """What a process asks of its bundle."""
        return {"CPU": float(self.cpu_count), "GPU": float(self.device_count)}


@names_the_right_one
@dataclass(frozen=True)
class CpuAcceleratorConfig(_Gang):
    """Workers with CPUs only, anywhere in the cluster, that are taken and lost together as the hosts of a slice are.

    Args:
        core_count: CPUs of each worker.
        worker_count: how many workers.

    The other arguments, and what is raised, are those of `TpuAcceleratorConfig`.

    >>> CpuAcceleratorConfig(core_count=2, worker_count=3).hosts_per_slice
    3
    """

    core_count: int = 1
    worker_count: int = 1
    kind: ClassVar[str] = "cpu"

    def __post_init__(self) -> None:
        self._check()
        for name in ("core_count", "worker_count"):
            _at_least(name, getattr(self, name), 1)

    def request(self, one: SliceInfo) -> dict[str, float]:
        """What a process asks of its bundle."""
        return {"CPU": float(self.core_count)}


AcceleratorConfigType = TpuAcceleratorConfig | GpuAcceleratorConfig | CpuAcceleratorConfig


def _at_least(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} is at least {least}, got {value}")


def _sizes(pod_count: int | Sequence[int]) -> int | tuple[int, ...]:
    """Checked; several in ascending order."""
    if isinstance(pod_count, int):
        _at_least("pod_count", pod_count, 1)
        return pod_count
    if not isinstance(pod_count, (list, tuple, range, set, frozenset)):
        raise TypeError(f"pod_count is an int, or a list of allowed ones, got {pod_count!r}")
    if not pod_count:
        raise ValueError("pod_count is an empty list: no number of slices is allowed")
    for one in pod_count:
        _at_least("each entry of pod_count", one, 1)
    return tuple(sorted(set(pod_count)))


def _resources(resources: Mapping[str, float] | None) -> None:
    for name, amount in (resources or {}).items():
        if name in ("CPU", "TPU", "GPU") or name.endswith("-head"):
            raise ValueError(f"resources cannot name {name!r}: cpu_count and the type of the slice say that")
        if not amount > 0:
            raise ValueError(f"resources must be above 0, got {name!r}: {amount!r}")
