# SPDX-License-Identifier: Apache-2.0
"""torch.distributed inside a worker of a group: what rank, store, axes and backend are is known already.

Needs the extra `torch`, in the worker's Python. Called by a method of every worker:

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
# Of `init_process_group`; torch gives later groups the backend's default.
_timeout: timedelta | None = None
# Before torch 2.10 groups kept the order they were given, and there was nothing to say.
_UNSORTED = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}


def init_process_group(backend: str | None = None, *, timeout_s: float = 600.0) -> None:
    """Join all workers of the group in one process group, with the store on the port that was leased for it.

    Every worker has to call it. With gloo, the network interface is the one that has the node's address in Ray, unless
    `GLOO_SOCKET_IFNAME` says otherwise: by default gloo takes what the host's name resolves to, often the loopback.

    Args:
        backend: "nccl", "gloo" or another of torch's; None: the cluster's `communication_backend`, and "gloo" for a
            group on bare slots.
        timeout_s: seconds that workers wait for each other, here and in collectives.

    Raises:
        RuntimeError: this process runs no worker of a group.
        torch.distributed.DistStoreError: the others did not come in time.
    """
    global _timeout
    worker = current_worker()
    backend = backend or worker.communication_backend or "gloo"
    if "gloo" in backend and "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = _interface_of(ray.util.get_node_ip_address())
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    dist.init_process_group(
        backend,
        init_method=_store_url(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]),
        rank=worker.rank,
        world_size=worker.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    _timeout = timedelta(seconds=timeout_s)


def _store_url(address: str, port: str) -> str:
    """Return where torch finds the store; an IPv6 address stands in brackets."""
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
    """The process group of the workers that differ from this one along these axes only.

    Made at the first use: every worker has to call it, and in the same order as other collectives. After that it is
    known.

    Args:
        axes: of the group's `sharding_annotations`; ranks within it are row-major over them in the order given.

    Raises:
        ValueError: there is no such axis, or none is named.
        RuntimeError: this process runs no worker of a group.
    """
    if not axes:
        raise ValueError("axis_group needs the axes along which its workers differ")
    if axes not in _groups:
        worker = current_worker()
        for members in worker.sharding.groups(*axes):
            # Not sorted: a rank's number in the group is its coordinate, also when ranks do not count up.
            made = dist.new_group(members, timeout=_timeout, **_UNSORTED)
            if worker.rank in members:
                _groups[axes] = made
    return _groups[axes]


def destroy() -> None:
    """Leave the process group and all groups made from it. Can be repeated."""
    global _timeout
    _groups.clear()
    _timeout = None
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class GradientBytes:
    """What synchronising a model's gradients has cost this worker.

    Attributes:
        handed: bytes handed to the collectives.
        uncompressed: bytes of the gradients they stood for.
    """

    handed: int = 0
    uncompressed: int = 0


_Hook = Callable[[Any, Any], Any]
_counts: "weakref.WeakKeyDictionary[Any, _Counter]" = weakref.WeakKeyDictionary()


def wrap_ddp(
    model: torch.nn.Module, *, compression: bool | Compression | None = None, group: Any = None, **options: Any
) -> torch.nn.parallel.DistributedDataParallel:
    """A `DistributedDataParallel` of a model, whose gradients travel compressed if the group says so.

    Args:
        model: on the device where it is to stay.
        compression: "fp16" or True, "bf16", "powersgd", or False for none; None: the group's
            `enable_gradient_compression`. The bf16 hook is our own: torch refuses its own off NCCL, although gloo
            reduces bfloat16. PowerSGD (Vogels et al., 2019) is torch's, of rank 1, from the second step on.
        group: the process group to average over, such as `axis_group("dp")`; None: all workers.
        options: others of `DistributedDataParallel`.

    Raises:
        ValueError: a compression that does not exist.
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
    """What has been handed to collectives for a model that `wrap_ddp` wrapped with a compression.

    Raises:
        ValueError: it was not: torch's own reducer does not count.
    """
    if model not in _counts:
        raise ValueError("bytes are counted for models that wrap_ddp wrapped with a compression; this is none")
    return _counts[model].bytes


class _Counter:
    """A communication hook, with the count of what it hands on."""

    def __init__(self, compression: str, group: Any) -> None:
        self.bytes = GradientBytes()
        self._group = group
        self._run: _Hook = {"fp16": self._fp16, "bf16": self._bf16, "powersgd": self._powersgd}[compression]
        if compression == "powersgd":
            # Error feedback and warm start need the gradients' shapes to settle: the least torch allows is 2.
            self._state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)

    def hook(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What `register_comm_hook` takes."""
        gradients = bucket.buffer()
        future, handed = self._run(gradients, bucket)
        self.bytes = GradientBytes(
            self.bytes.handed + handed, self.bytes.uncompressed + gradients.numel() * gradients.element_size()
        )
        return future

    def _fp16(self, gradients: Any, bucket: Any) -> Any:
        return default_hooks.fp16_compress_hook(self._group, bucket), 2 * gradients.numel()

    def _bf16(self, gradients: Any, bucket: Any) -> Any:
        group = self._group or dist.group.WORLD
        # Divided before the sum, so that it stays in range.
        small = gradients.to(torch.bfloat16).div_(dist.get_world_size(group))
        summed = dist.all_reduce(small, group=group, async_op=True).get_future()
        return summed.then(lambda done: gradients.copy_(done.value()[0])), small.numel() * small.element_size()

    def _powersgd(self, gradients: Any, bucket: Any) -> Any:
        if self._state.iter < self._state.start_powerSGD_iter:
            return powerSGD_hook.powerSGD_hook(self._state, bucket), gradients.numel() * gradients.element_size()
        before = self._state.total_numel_after_compression
        future = powerSGD_hook.powerSGD_hook(self._state, bucket)
        return future, (self._state.total_numel_after_compression - before) * gradients.element_size()
