# SPDX-License-Identifier: Apache-2.0
"""torch.distributed inside a worker of a group, which knows its rank, store, axes and backend already.

It needs the extra `torch` in the worker's Python. A method of every worker calls:

    init_process_group()
    model = wrap_ddp(model)
    dist.all_reduce(loss, group=axis_group("dp"))
    destroy()

After a resize of the group, its method `on_resize` calls:

    init_process_group()
    broadcast_state(model, optimizer)
    model = rewrap_ddp(model)
"""

# No `from __future__ import annotations`: torch compares the annotations of communication hooks.
import inspect
import io
import ipaddress
import os
import pickle
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from ._context import Compression, CurrentWorker, check_compression, current_worker

__all__ = [
    "GradientBytes",
    "axis_group",
    "broadcast_state",
    "destroy",
    "gradient_bytes",
    "init_process_group",
    "rewrap_ddp",
    "wrap_ddp",
]

# Between two looks of rank 0 at who has arrived.
ARRIVED_S = 0.005
# In place of the name that a worker arrives with.
NOBODY = "-"

_groups: dict[tuple[str, ...], Any] = {}
# The timeout of `init_process_group`, for later groups, to which torch gives the backend's default.
_timeout: timedelta | None = None
# How many process groups this process has joined.
_joined = 0
# The store of the latest attempt to join one. Rank 0 serves it, also between attempts.
_store: dist.TCPStore | None = None
# Before torch 2.10 there was no such option, and groups kept the given order.
_UNSORTED = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}


def init_process_group(backend: str | None = None, *, timeout_s: float = 600.0) -> None:
    """Join all workers of the group in one process group, with the store on the leased master port.

    Every worker has to call it. A worker that is in a process group leaves it first, so after a resize or a restart of
    the group all workers call it again. They can also repeat it when some of them have failed before they called it,
    and the others have waited in vain. Wait for `call.outcomes()` before that: `call.result()` raises the first error
    while others are still in this call, and they would meet those that are in the next one. Models keep the process
    group that they were wrapped with; see `rewrap_ddp`.

    Unless `GLOO_SOCKET_IFNAME` is set, gloo uses the network interface that has the node's
    address in Ray. Gloo's own default is the interface of the host name's address, which is often the loopback.

    Args:
        backend: "nccl", "gloo" or another backend of torch; None uses the cluster's `communication_backend`, or "gloo"
            for a group that was made from slots.
        timeout_s: seconds that workers wait for each other, here and in collectives.

    Raises:
        RuntimeError: this process runs no worker of a group.
        torch.distributed.DistStoreError: other workers did not join in time.
    """
    global _timeout, _joined, _store
    worker = current_worker()
    backend = backend or worker.communication_backend or "gloo"
    if "gloo" in backend and "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = _interface_of(ray.util.get_node_ip_address())
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    timeout = timedelta(seconds=timeout_s)
    rank, world_size = worker.rank, worker.world_size
    with worker.waiting():
        # Before the old group is left, and with it its store: others may be connected to the server already.
        _store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
        _store.set_timeout(timeout)
        _leave()
        # The store may have keys of earlier groups, which must not be read again.
        store = dist.PrefixStore(_meet(_store, worker, timeout_s), _store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    _timeout = timeout
    _joined += 1


def _meet(store: dist.TCPStore, worker: CurrentWorker, timeout_s: float) -> str:
    """Return a name shared by all workers currently in this call, after each has arrived.

    No worker counts its calls, as some may have failed before. If rank 0 gives up, it answers with an empty name.
    """
    own = uuid.uuid4().hex
    arrivals = [f"epoch {worker.epoch} rank {rank}" for rank in range(worker.world_size)]
    if worker.rank:
        store.set(arrivals[worker.rank], own)
        try:
            if name := str(store.get(own).decode()):
                return name
        except dist.DistStoreError:
            store.delete_key(arrivals[worker.rank])
        raise dist.DistStoreError(
            f"rank {worker.rank} has waited in vain for the others, which had {timeout_s:g} s to call "
            "init_process_group. Rank 0 knows which ranks did not call it; look at its error."
        )
    everybody = range(1, worker.world_size)
    absent, deadline = list(everybody), time.monotonic() + timeout_s
    while absent := [rank for rank in absent if not store.check([arrivals[rank]])]:
        if time.monotonic() > deadline:
            for rank in set(everybody) - set(absent):
                # Unlike `get`, this does not wait for a worker that has given up as well.
                name = store.compare_set(arrivals[rank], NOBODY, NOBODY).decode()
                if name != NOBODY:
                    store.delete_key(arrivals[rank])
                    store.set(name, "")
            raise dist.DistStoreError(
                f"rank(s) {', '.join(map(str, absent))} did not call init_process_group within {timeout_s:g} s, and "
                "every worker of the group has to. Look at their errors."
            )
        time.sleep(ARRIVED_S)
    names = [store.get(arrival).decode() for arrival in arrivals[1:]]
    for arrival, name in zip(arrivals[1:], names, strict=True):
        store.delete_key(arrival)
        store.set(name, own)
    return own


def _interface_of(address: str) -> str | None:
    """Return the network interface that has an IPv4 or IPv6 address; None if none has, or for a host name."""
    import psutil  # Ray brings it, and puts it on the path when it is imported.

    try:
        wanted = str(ipaddress.ip_address(address.partition("%")[0]))
    except ValueError:  # `ray start` takes a host name too
        return None
    held = ((name, one.address) for name, addresses in psutil.net_if_addrs().items() for one in addresses)
    return next((name for name, one in held if one.partition("%")[0] == wanted), None)


def axis_group(*axes: str) -> dist.ProcessGroup:
    """Return the process group of the workers that differ from this one only along these axes.

    The first call creates it, so every worker has to make that call, in the same order as other collectives. Later
    calls return the same process group.

    Args:
        axes: axes of the group's `sharding_annotations`. Ranks in the process group are row-major over these axes in
            the given order.

    Raises:
        ValueError: there is no such axis, or no axis is given.
        RuntimeError: this process runs no worker of a group.
    """
    if not axes:
        raise ValueError("axis_group needs the axes along which its workers differ")
    if axes not in _groups:
        worker = current_worker()
        for members in worker.sharding.groups(*axes):
            # Not sorted, so that a worker's rank in the process group is its coordinate, whatever the order of ranks.
            with worker.waiting():
                group = dist.new_group(members, timeout=_timeout, **_UNSORTED)
            if worker.rank in members:
                _groups[axes] = group
    return _groups[axes]


def destroy() -> None:
    """Leave the process group, and all process groups of axes. Can be repeated."""
    global _store
    _leave()
    _store = None


def _leave() -> None:
    global _timeout
    _groups.clear()
    _timeout = None
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class GradientBytes:
    """The bytes that this worker has sent to synchronise the gradients of a model.

    Attributes:
        handed: bytes passed to the collectives.
        uncompressed: bytes of the gradients before the compression.
    """

    handed: int = 0
    uncompressed: int = 0


_Hook = Callable[[Any, Any], Any]
_counts: "weakref.WeakKeyDictionary[Any, _Counter]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Wrapping:
    """How `wrap_ddp` wrapped a model: what it was given, and the axes of the process group if it has any."""

    compression: bool | Compression | None
    axes: tuple[str, ...] | None
    options: dict[str, Any]


_wrappings: "weakref.WeakKeyDictionary[Any, _Wrapping]" = weakref.WeakKeyDictionary()


def wrap_ddp(
    model: torch.nn.Module, *, compression: bool | Compression | None = None, group: Any = None, **options: Any
) -> torch.nn.parallel.DistributedDataParallel:
    """Return a `DistributedDataParallel` of a model, with compression of the gradients if the group enables it.

    Args:
        model: the model, on its final device.
        compression: "fp16" or True, "bf16", "powersgd", or False for none; None uses the group's
            `enable_gradient_compression`. The bf16 hook is our own, because torch refuses its own without NCCL,
            although gloo reduces bfloat16. PowerSGD (Vogels et al., 2019) is torch's, with rank 1, from the second step
            on.
        group: the process group to average over, such as `axis_group("dp")`; None for all workers.
        options: further options of `DistributedDataParallel`.

    Raises:
        ValueError: the compression does not exist.
        RuntimeError: this process runs no worker of a group.
    """
    worker = current_worker()
    chosen = worker.gradient_compression if compression is None else check_compression(compression)
    axes = () if group is None else next((axes for axes, one in _groups.items() if one is group), None)
    wrapping = _Wrapping(compression, axes, dict(options))
    device = next(model.parameters()).device
    if device.type == "cuda":
        options.setdefault("device_ids", [device])
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=group, **options)
    _wrappings[wrapped] = wrapping
    if chosen is not None:
        counter = _Counter(chosen, group)
        wrapped.register_comm_hook(None, counter.hook)
        _counts[wrapped] = counter
    return wrapped


def rewrap_ddp(model: torch.nn.Module, *, group: Any = None) -> torch.nn.parallel.DistributedDataParallel:
    """Return a new `DistributedDataParallel` of a model that `wrap_ddp` wrapped, over the process groups of now.

    A wrapped model keeps its process group, which has other members than the group of workers after a resize. Every
    worker calls it at the same time as those that wrap the model for the first time. The compression and the options
    are those that `wrap_ddp` was given; counted bytes and the error feedback of PowerSGD start again. All replicas get
    the parameters of rank 0 of the process group, so call `broadcast_state` first.

    Args:
        model: the wrapped model. Use the result instead of it.
        group: the process group to average over; None for that of the same axes, or of all workers, as before.

    Raises:
        ValueError: `wrap_ddp` has not wrapped the model; or it was given a process group that is not that of axes, and
            no other one is given now.
        RuntimeError: this process runs no worker of a group.
    """
    wrapping = _wrappings.get(model)
    if wrapping is None or not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"rewrap_ddp takes a model that wrap_ddp has returned, got a {type(model).__qualname__}. Wrap it with "
            "wrap_ddp."
        )
    if group is None and wrapping.axes != ():
        if wrapping.axes is None:
            raise ValueError("The model was wrapped with a process group of its own; give the new one with group=.")
        group = axis_group(*wrapping.axes)
    return wrap_ddp(model.module, compression=wrapping.compression, group=group, **wrapping.options)


def broadcast_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    source: int | None = None,
    group: Any = None,
) -> None:
    """Give all replicas the parameters, the buffers and the optimizer's state of one of them.

    Every worker has to call it, such as in `on_resize`: new workers then have what the others have learned, including
    the moments of Adam.

    Args:
        model: the model, wrapped or not. Its parameters are overwritten in place.
        optimizer: its optimizer; None for none.
        source: the rank in the process group whose state all get; None for the lowest of the ranks that have joined
            most process groups, which is not one that has just started.
        group: the process group of the replicas, such as `axis_group("dp")`; None for all workers.

    Raises:
        TypeError: a parameter is a DTensor, which each rank holds a part of.
        ValueError: there is no such rank; or the models differ in their tensors, which every worker raises.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if source is not None and not 0 <= source < world:
        raise ValueError(f"source must be a rank of the process group, 0 to {world - 1}, got {source!r}")
    tensors = [one.detach() for one in (*model.parameters(), *model.buffers())]
    if any(hasattr(one, "placements") for one in tensors):
        raise TypeError(
            "broadcast_state copies whole replicas, and some parameters are DTensors, of which each rank holds a part"
        )
    device = tensors[0].device if tensors else torch.device("cpu")
    if source is None:
        # The largest number is that of the lowest rank among those that have joined most often.
        oldest = torch.tensor([_joined * world - rank], device=device)
        dist.all_reduce(oldest, dist.ReduceOp.MAX, group=group)
        source = -int(oldest) % world
    sender = source if group is None else dist.get_global_rank(group, source)

    outline, moments = io.BytesIO(), list[torch.Tensor]()
    if rank == source:
        _OutlinePickler(outline, moments).dump({} if optimizer is None else optimizer.state_dict())
    shapes = [(one.shape, one.dtype) for one in tensors]
    plan = [(shapes, outline.getvalue())]
    dist.broadcast_object_list(plan, sender, group=group, device=device)
    agrees = torch.tensor([int(plan[0][0] == shapes)], device=device)
    dist.all_reduce(agrees, dist.ReduceOp.MIN, group=group)
    if not agrees:
        raise ValueError(f"Workers have models whose tensors differ in shape or dtype from those of rank {source}.")
    state = {}
    if rank != source:
        state = _OutlineUnpickler(io.BytesIO(plan[0][1]), moments, device).load()
    for tensor in (*tensors, *moments):
        # NCCL takes no tensors in host memory, where Adam counts its steps, and gloo only contiguous ones.
        sent = tensor.to(device).contiguous()
        dist.broadcast(sent, sender, group=group)
        if sent is not tensor:
            tensor.copy_(sent)
    if optimizer is not None and state:
        optimizer.load_state_dict(state)


class _OutlinePickler(pickle.Pickler):
    """Pickles a value without its tensors, which it collects."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_id(self, value: Any) -> Any:
        """Take a tensor out."""
        if not isinstance(value, torch.Tensor):
            return None
        self._tensors.append(value.detach())
        return value.shape, value.dtype, value.device.type == "cpu"


class _OutlineUnpickler(pickle.Unpickler):
    """Restores such a value with new tensors, which it collects in the same order."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor], device: torch.device) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._device = device

    def persistent_load(self, description: Any) -> torch.Tensor:
        """Return a new tensor."""
        shape, dtype, in_host_memory = description
        self._tensors.append(torch.empty(shape, dtype=dtype, device="cpu" if in_host_memory else self._device))
        return self._tensors[-1]


def gradient_bytes(model: torch.nn.parallel.DistributedDataParallel) -> GradientBytes:
    """Return the bytes passed to collectives for a model that `wrap_ddp` wrapped with a compression.

    Raises:
        ValueError: the model was wrapped without a compression; torch's own reducer does not count bytes.
    """
    if model not in _counts:
        raise ValueError(
            "Bytes are counted only for models that wrap_ddp wrapped with a compression. Give wrap_ddp a compression."
        )
    return _counts[model].bytes


# They divide before the sum, so that it stays in range.
_CASTS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


class _Counter:
    """A communication hook that counts the bytes it passes to collectives."""

    def __init__(self, compression: str, group: Any) -> None:
        self.bytes = GradientBytes()
        self._group = group
        self._compression = compression
        self._run: _Hook = self._cast if compression in _CASTS else self._powersgd
        if compression == "powersgd":
            # Error feedback and warm start need stable shapes of the gradients. 2 is the smallest value torch allows.
            self._state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)

    def hook(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Compress and reduce a bucket of gradients; `register_comm_hook` takes this."""
        gradients = bucket.buffer()
        future, handed = self._run(gradients, bucket)
        self.bytes = GradientBytes(self.bytes.handed + handed, self.bytes.uncompressed + gradients.nbytes)
        return future

    def _cast(self, gradients: Any, bucket: Any) -> Any:
        return _CASTS[self._compression](self._group, bucket), 2 * gradients.numel()

    def _powersgd(self, gradients: Any, bucket: Any) -> Any:
        if self._state.iter < self._state.start_powerSGD_iter:
            return powerSGD_hook.powerSGD_hook(self._state, bucket), gradients.nbytes
        before = self._state.total_numel_after_compression
        future = powerSGD_hook.powerSGD_hook(self._state, bucket)
        return future, (self._state.total_numel_after_compression - before) * gradients.element_size()
