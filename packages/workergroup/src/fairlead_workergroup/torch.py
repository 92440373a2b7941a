# SPDX-License-Identifier: Apache-2.0
"""torch.distributed inside a worker of a group, which knows its rank, store, axes and backend already.

It needs the extra `torch` in the worker's Python. A method of every worker calls:

    init_process_group()
    model = wrap_ddp(model)
    dist.all_reduce(loss, group=axis_group("dp"))
    destroy()
"""

# No `from __future__ import annotations`: torch compares the annotations of communication hooks.
import fcntl
import inspect
import os
import socket
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from ._context import Compression, check_compression, current_worker

__all__ = ["GradientBytes", "axis_group", "destroy", "gradient_bytes", "init_process_group", "wrap_ddp"]

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>

_groups: dict[tuple[str, ...], Any] = {}
# The timeout of `init_process_group`, for later groups, to which torch gives the backend's default.
_timeout: timedelta | None = None
# Before torch 2.10 there was no such option, and groups kept the given order.
_UNSORTED = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}


def init_process_group(backend: str | None = None, *, timeout_s: float = 600.0) -> None:
    """Join all workers of the group in one process group, with the store on the leased master port.

    Every worker has to call it. Unless `GLOO_SOCKET_IFNAME` is set, gloo uses the network interface that has the node's
    address in Ray. Gloo's own default is the interface of the host name's address, which is often the loopback.

    Args:
        backend: "nccl", "gloo" or another backend of torch; None uses the cluster's `communication_backend`, or "gloo"
            for a group that was made from slots.
        timeout_s: seconds that workers wait for each other, here and in collectives.

    Raises:
        RuntimeError: this process runs no worker of a group.
        torch.distributed.DistStoreError: other workers did not join in time.
    """
    global _timeout
    worker = current_worker()
    backend = backend or worker.communication_backend or "gloo"
    if "gloo" in backend and "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = _interface_of(ray.util.get_node_ip_address())
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    timeout = timedelta(seconds=timeout_s)
    url = _store_url(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    rank, world_size = worker.rank, worker.world_size
    with worker.waiting():
        dist.init_process_group(backend, init_method=url, rank=rank, world_size=world_size, timeout=timeout)
    _timeout = timeout


def _store_url(address: str, port: str) -> str:
    """Return the URL of the store, with an IPv6 address in brackets."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def _interface_of(address: str) -> str | None:
    """Return the network interface that has an IPv4 or IPv6 address; None if none has."""
    if ":" in address:
        return _interface_of_ipv6(socket.inet_pton(socket.AF_INET6, address.partition("%")[0]))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _interface_of_ipv6(address: bytes) -> str | None:
    try:
        with open("/proc/net/if_inet6") as file:
            lines = [line.split() for line in file]
    except FileNotFoundError:
        return None  # this machine has no IPv6
    return next((name for digits, *_, name in lines if bytes.fromhex(digits) == address), None)


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
    if chosen is not None:
        counter = _Counter(chosen, group)
        wrapped.register_comm_hook(None, counter.hook)
        _counts[wrapped] = counter
    return wrapped


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


class _Counter:
    """A communication hook that counts the bytes it passes to collectives."""

    def __init__(self, compression: str, group: Any) -> None:
        self.bytes = GradientBytes()
        self._group = group
        self._run: _Hook = {"fp16": self._fp16, "bf16": self._bf16, "powersgd": self._powersgd}[compression]
        if compression == "powersgd":
            # Error feedback and warm start need stable shapes of the gradients. 2 is the smallest value torch allows.
            self._state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)

    def hook(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Compress and reduce a bucket of gradients; `register_comm_hook` takes this."""
        gradients = bucket.buffer()
        future, handed = self._run(gradients, bucket)
        self.bytes = GradientBytes(self.bytes.handed + handed, self.bytes.uncompressed + gradients.nbytes)
        return future

    def _fp16(self, gradients: Any, bucket: Any) -> Any:
        return default_hooks.fp16_compress_hook(self._group, bucket), 2 * gradients.numel()

    def _bf16(self, gradients: Any, bucket: Any) -> Any:
        group = self._group or dist.group.WORLD
        # Divide before the sum, so that it stays in range.
        small = gradients.to(torch.bfloat16).div_(dist.get_world_size(group))
        summed = dist.all_reduce(small, group=group, async_op=True).get_future()
        return summed.then(lambda done: gradients.copy_(done.value()[0])), small.nbytes

    def _powersgd(self, gradients: Any, bucket: Any) -> Any:
        if self._state.iter < self._state.start_powerSGD_iter:
            return powerSGD_hook.powerSGD_hook(self._state, bucket), gradients.nbytes
        before = self._state.total_numel_after_compression
        future = powerSGD_hook.powerSGD_hook(self._state, bucket)
        return future, (self._state.total_numel_after_compression - before) * gradients.element_size()
