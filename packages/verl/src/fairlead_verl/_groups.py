# SPDX-License-Identifier: Apache-2.0
"""verl's worker groups over groups of Fairlead.

verl's `@register`, its dispatch functions, `Worker`, `FusedWorker` and `WorkerDict` are used as they are. Only the
start of workers and the calls of actors are replaced.
"""

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from verl.protocol import DataProtoFuture
from verl.single_controller.base.decorator import MAGIC_ATTR
from verl.single_controller.ray import base

from fairlead_workergroup import (
    GroupHandle,
    PerWorker,
    RayWorkerBuilder,
    Timeouts,
    WorkerFailureError,
    WorkerOptions,
    attach,
)
from fairlead_workergroup import RayWorkerGroup as Group

from ._pools import read_seconds, refuse, refuse_detached, slots_of

# The group chooses these, and restarts no worker by itself, as verl.
OURS = ("lifetime", "name", "num_cpus", "num_gpus", "scheduling_strategy")
PROTECTED = ("WORLD_SIZE", "RANK", "WG_PREFIX", "WG_BACKEND", "RAY_LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The groups of this process by their id, for verl's names of workers.
_made: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()
# The calls that the current `record` sees. They know why they failed, and keep their results and their group alive.
_calls: ContextVar[list[Any] | None] = ContextVar("calls", default=None)


def make_builder(described: Any, runtime_env: Mapping[str, Any] | None) -> RayWorkerBuilder:
    """Return the builder for verl's description of a class, with the methods that verl calls."""
    cls = getattr(described.cls, "__ray_actor_class__", described.cls)
    options = {**described._options, **({"runtime_env": runtime_env} if runtime_env else {})}  # noqa: SLF001
    if len(described._additional_resource) > 1:  # noqa: SLF001  verl ignores a single one
        options |= described._additional_resource  # noqa: SLF001
    options = {name: value for name, value in options.items() if name not in OURS}
    worker = described.cls
    if options:
        worker = ray.remote(**{**(getattr(worker, "_default_options", None) or {}), **options})(cls)
    called = (name for name, value in inspect.getmembers(cls, inspect.isfunction) if is_called(name, value))
    return RayWorkerBuilder(worker, *described.args, **described.kwargs).with_methods(*called)


def is_called(name: str, function: Any) -> bool:
    """Return whether verl calls a method that is not public."""
    named = name == base.RayWorkerGroup.fused_worker_execute_fn_name or hasattr(function, MAGIC_ATTR)
    return named and name.startswith("_") and not name.startswith("__")


def record(start: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
    """Return the calls of Fairlead that a function makes, and its result."""
    calls: list[Any] = []
    token = _calls.set(calls)
    try:
        return calls, start(*args, **kwargs)
    finally:
        _calls.reset(token)


def explain(calls: Sequence[Any], get: Callable[[], Any]) -> Any:
    """Return the results of calls; raise the loss of a worker as Fairlead explains it."""
    try:
        return get()
    except ray.exceptions.RayError as error:
        try:
            for call in calls:
                call.result()
        except WorkerFailureError:
            raise
        except Exception:  # noqa: BLE001  a worker's own exception, which verl raises with Ray's type
            raise error from None
        raise


def fetch(execute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the values of the references that a call returns."""
    calls, references = record(execute, *args, **kwargs)
    return explain(calls, partial(ray.get, references))


class Future(DataProtoFuture):  # type: ignore[misc]
    """verl's future. Another process gets one of verl's own."""

    calls: Sequence[Any] = ()

    def get(self) -> Any:
        """Wait for the data, and return it."""
        return explain(self.calls, super().get)

    def __reduce__(self) -> Any:
        return DataProtoFuture, (self.collect_fn, self.futures, self.dispatch_fn)


def explain_failures(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Return verl's maker of methods with another way to wait for the results."""

    def make(
        group: Any, method_name: str, dispatch_fn: Any, collect_fn: Any, execute_fn: Callable[..., Any], blocking: bool
    ) -> Any:
        execute = partial(fetch, execute_fn) if blocking else execute_fn
        start = generate(group, method_name, dispatch_fn, collect_fn, execute, blocking=False)

        def start_later(*args: Any, **kwargs: Any) -> Any:
            calls, output = record(start, *args, **kwargs)
            if isinstance(output, DataProtoFuture):
                output = Future(output.collect_fn, output.futures, output.dispatch_fn)
                output.calls = calls
            return output

        return start if blocking else start_later

    return make


class RayWorkerGroup(base.RayWorkerGroup):  # type: ignore[misc]
    """verl's worker group. Its workers run in a group of Fairlead, which `fairlead_group` is.

    Attributes:
        fairlead_group: the group, its handle in another process, or None for workers that were given as handles.
    """

    fairlead_group: Group | GroupHandle | None = None

    def _init_with_resource_pool(
        self,
        resource_pool: Any,
        ray_cls_with_init: Any,
        bin_pack: bool,
        detached: bool,
        worker_env: Mapping[str, str] | None = None,
    ) -> None:
        if detached:
            refuse_detached("detached worker groups")
        if self._master_addr or self._master_port:  # verl 0.9.1 itself forgets them
            refuse("leases a port on the node of rank 0 (of master_port_range), so neither can be given")
        if self.use_gpu and not resource_pool.use_gpu:
            raise ValueError("use_gpu is True but resource_pool.use_gpu is False")
        if taken := {*PROTECTED} & {*(worker_env or {})}:
            raise ValueError(f"Cannot override protected system env: {taken}")
        self.resource_pool = resource_pool
        strategy = "STRICT_PACK" if bin_pack else "PACK"
        resource_pool.get_placement_groups(strategy=strategy, device_name=self.device_name)
        slots = slots_of(resource_pool)
        if not self.use_gpu:
            slots = [replace(slot, accelerators={}, worker_resources={"CPU": 1.0}) for slot in slots]
        profiled = self.profile_steps and self.device_name == "cuda"
        ports = self._ray_master_port_range  # without its end
        builder = make_builder(ray_cls_with_init, {"nsight": self.worker_nsight_options} if profiled else None)
        group = Group(
            slots,
            builder,
            name_prefix=f"{self.name_prefix}{builder.ray_actor_class_fqn.rpartition('.')[2]}",
            env_vars={
                **(worker_env or {}),
                "WG_PREFIX": self.name_prefix,
                "WG_BACKEND": "ray",
                "RAY_LOCAL_WORLD_SIZE": str(resource_pool.store[0]),
            },
            worker=WorkerOptions(master_port=(ports[0], ports[1] - 1) if ports else None),
            async_communication="auto",
            timeouts=Timeouts(start_s=read_seconds("FAIRLEAD_VERL_START_TIMEOUT_S", 600.0)),
        )
        _made[group.handle().group_id] = group
        self._use(group)

    _init_with_subresource_pool = _init_with_resource_pool

    def _init_with_detached_workers(self, worker_names: Sequence[str] | None, worker_handles: Any) -> None:
        group_id, separator, _ = worker_names[0].partition("/") if worker_names else ("", "", "")
        if separator:
            self._use(_made.get(group_id) or attach(group_id))
            if self._worker_names != list(worker_names or ()):
                raise ValueError(
                    "fairlead-verl attaches to all workers of a group, in the order of their ranks, but worker_names "
                    f"is {worker_names!r}. Give {self._worker_names!r}."
                )
        else:
            super()._init_with_detached_workers(worker_names, worker_handles)

    def _use(self, group: Group | GroupHandle) -> None:
        """Take the workers of a group. verl's names of them are the id of the group and the rank."""
        self.fairlead_group = group
        self._workers = group.at().workers
        self._world_size = len(self._workers)
        group_id = group.group_id if isinstance(group, GroupHandle) else group.handle().group_id
        self._worker_names = [f"{group_id}/{rank}" for rank in range(self._world_size)]
        if isinstance(group, Group):
            self._master_addr, self._master_port = group.master_address, str(group.master_port)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle holds: another process gets a handle of the group, as only its maker owns it."""
        group = self.fairlead_group
        return {**self.__dict__, "fairlead_group": group.handle() if isinstance(group, Group) else group}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(group := self.fairlead_group, GroupHandle):
            self.fairlead_group = _made.get(group.group_id) or group

    def _bind_worker_method(self, user_defined_cls: Any, func_generator: Callable[..., Any]) -> Any:
        return super()._bind_worker_method(user_defined_cls, explain_failures(func_generator))

    def _is_worker_alive(self, worker: Any) -> bool:
        if (group := self.fairlead_group) is None:
            return bool(super()._is_worker_alive(worker))
        statuses = group.status() if isinstance(group, GroupHandle) else group.get_worker_status()
        return statuses[self._workers.index(worker)].state not in ("dead", "starting", "restarting")

    def _send(self, target: Any, method_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Call the workers of a view, as verl's `_execute_remote_single_worker` calls one."""
        if self.fused_worker_used and method_name not in self.method_names:
            args = (f"{self.sub_cls_name}_fwmn_{method_name}", *args)
            method_name = self.fused_worker_execute_fn_name
        call = target.with_options().call(method_name, *args, **kwargs)
        if (calls := _calls.get()) is not None:
            calls.append(call)
        refs: list[Any] = call.refs
        return refs

    def _execute_remote_single_worker(self, worker: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
        if self.fairlead_group is None:
            return super()._execute_remote_single_worker(worker, method_name, *args, **kwargs)
        view = self.fairlead_group.at(worker=self._workers.index(worker))
        return self._send(view, method_name, args, kwargs)[0]

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of all workers, with one element for each if all arguments are lists of that length."""
        if self.fairlead_group is None:
            return super().execute_all_async(method_name, *args, **kwargs)
        if all(isinstance(values, list) and len(values) == self._world_size for values in (*args, *kwargs.values())):
            args = tuple(map(PerWorker, args))
            kwargs = {name: PerWorker(value) for name, value in kwargs.items()}
        return self._send(self.fairlead_group, method_name, args, kwargs)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Do the same, and return the results."""
        return fetch(self.execute_all_async, method_name, *args, **kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of rank 0, and return its result."""
        return fetch(self.execute_rank_zero_async, method_name, *args, **kwargs)
