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
    model = wrap_ddp(model.module)
"""

# No `from __future__ import annotations`: torch compares the annotations of communication hooks.
import inspect
import io
import os
import pickle
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from ._context import Compression, check_compression, current_worker

__all__ = [
    "axis_group",
    "broadcast_state",
    "destroy",
    "init_process_group",
    "wrap_ddp",
]

_groups: dict[tuple[str, ...], Any] = {}
# The timeout of `init_process_group`, for later groups, to which torch gives the backend's default.
_timeout: timedelta | None = None
# How many process groups this process has joined.
_joined = 0
# The epoch of the latest attempt to join one, and the number of attempts in that epoch.
_attempts = -1, 0
# The store of the latest attempt to join one. Rank 0 serves it, also between attempts.
_store: dist.TCPStore | None = None
# Before torch 2.10 there was no such option, and groups kept the given order.
_UNSORTED = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}


def init_process_group(backend: str | None = None, *, timeout_s: float = 600.0) -> None:
    """Join all workers of the group in one process group, with the store on the leased master port.

    Every worker has to call it. A worker that is in a process group leaves it first, so after a resize or a restart of
    the group all workers call it again. If a worker fails before it calls it, the others wait until the timeout, and
    the workers can only join after a restart or a resize of the group. Models keep the process group that they were
    wrapped with; wrap them again with `wrap_ddp`.

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
    global _timeout, _joined, _attempts, _store
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
        _attempts = worker.group_epoch, _attempts[1] + 1 if _attempts[0] == worker.group_epoch else 1
        # The store may have keys of earlier attempts, which must not be read again.
        store = dist.PrefixStore("epoch {} attempt {}".format(*_attempts), _store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    _timeout = timeout
    _joined += 1


def _interface_of(address: str) -> str | None:
    """Return the network interface that has an IPv4 or IPv6 address; None if none has, or for a host name."""
    import psutil  # Ray brings it, and puts it on the path when it is imported.

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address.partition("%")[0] for entry in entries):
            return str(name)
    return None


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
    device = next(model.parameters()).device
    if device.type == "cuda":
        options.setdefault("device_ids", [device])
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=group, **options)
    if chosen == "powersgd":
        # Error feedback and warm start need stable shapes of the gradients. 2 is the smallest value torch allows.
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif chosen is not None:
        # They divide before the sum, so that it stays in range.
        wrapped.register_comm_hook(group, default_hooks.fp16_compress_hook if chosen == "fp16" else _reduce_bf16)
    return wrapped


def _reduce_bf16(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Run torch's hook, which `register_comm_hook` refuses under its own name without NCCL."""
    return default_hooks.bf16_compress_hook(group, bucket)


def broadcast_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, *, group: Any = None
) -> None:
    """Give all replicas the parameters, the buffers and the optimizer's state of one of them.

    Every worker has to call it, such as in `on_resize`: new workers then have what the others have learned, including
    the moments of Adam. The state is that of the lowest of the ranks that have joined most process groups, which is not
    one that has just started.

    Args:
        model: the model, wrapped or not. Its parameters are overwritten in place.
        optimizer: its optimizer; None for none.
        group: the process group of the replicas, such as `axis_group("dp")`; None for all workers.

    Raises:
        TypeError: a parameter is a DTensor, which each rank holds a part of.
        ValueError: the models differ in their tensors, which every worker raises.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    if any(hasattr(tensor, "placements") for tensor in tensors):
        raise TypeError(
            "broadcast_state copies whole replicas, and some parameters are DTensors, of which each rank holds a part"
        )
    device = tensors[0].device if tensors else torch.device("cpu")
    # The largest number is that of the lowest rank among those that have joined most often.
    oldest = torch.tensor([_joined * world - rank], device=device)
    dist.all_reduce(oldest, dist.ReduceOp.MAX, group=group)
    source = -int(oldest) % world
    sender = source if group is None else dist.get_global_rank(group, source)

    outline, moments = io.BytesIO(), list[torch.Tensor]()
    if rank == source:
        _OutlinePickler(outline, moments).dump({} if optimizer is None else optimizer.state_dict())
    shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
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
