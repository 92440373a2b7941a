# SPDX-License-Identifier: Apache-2.0
"""The functions that code inside a worker calls: its identity, and reports of progress."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from fairlead_sharding import NamedSharding

Compression = Literal["fp16", "bf16", "powersgd"]
COMPRESSIONS: tuple[Compression, ...] = get_args(Compression)


def _published() -> Any:
    return sys.modules.get("_fairlead_worker")


@dataclass(frozen=True)
class CurrentWorker:
    """The worker that this process runs.

    Attributes:
        rank: its number in the group.
        world_size: the number of workers in the group.
        name: its name, as in `worker_metadata`.
        coords: its coordinates, by axis.
        incarnation: how often its rank has been started before.
        group_epoch: the number of changes of membership (restarts and resizes) that it knows of.
        communication_backend: the backend that the cluster chose for its workers: "nccl", "gloo", or None.
        gradient_compression: the compression that `wrap_ddp` uses: "fp16", "bf16", "powersgd", or None.
        layout: the group's sharding as plain data.
    """

    rank: int
    world_size: int
    name: str
    coords: Mapping[str, int]
    incarnation: int
    group_epoch: int
    communication_backend: Literal["nccl", "gloo"] | None
    gradient_compression: Compression | None
    layout: Mapping[str, Any]

    @cached_property
    def sharding(self) -> NamedSharding:
        """The axes of the group over its ranks, for peers, neighbours and groups along axes."""
        return NamedSharding.from_dict(self.layout)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark a block in which this worker waits for other workers, such as a collective.

        `python -m fairlead_inspect why` then knows who waits for whom. The helpers of `fairlead_workergroup.torch` mark
        their own collectives. It takes about two microseconds.
        """
        record = getattr(_published(), "record", None)
        if record is None:
            yield
            return
        record.count_waiting(1)
        try:
            yield
        finally:
            record.count_waiting(-1)


def current_worker() -> CurrentWorker:
    """Return the worker that this process runs, for code that is called by one of its methods.

    Raises:
        RuntimeError: this process runs no worker of a group.

    >>> current_worker()
    Traceback (most recent call last):
    RuntimeError: this process runs no worker of a RayWorkerGroup; call this from a worker's method
    """
    facts = getattr(_published(), "facts", {})
    if "rank" not in facts:
        raise RuntimeError("this process runs no worker of a RayWorkerGroup; call this from a worker's method")
    known = {**facts, "group_epoch": facts["epoch"]}
    return CurrentWorker(**{name: known[name] for name in CurrentWorker.__dataclass_fields__})


def report_progress(step: int | None = None, message: str | None = None) -> None:
    """Report that this worker makes progress. A method that runs for long without a report counts as stuck.

    A report takes about a microsecond and makes no request. Outside a worker it does nothing, so that code runs
    unchanged without a group.

    Args:
        step: a whole number that grows, such as the training step; it is shown until the next one.
        message: a line for people; it is cut off after 256 bytes.

    Raises:
        TypeError, ValueError: in a worker, the step is not a whole number or does not fit in 64 bits.

    >>> report_progress(step=3, message="no effect outside a worker")
    """
    record = getattr(_published(), "record", None)
    if record is not None:
        record.progress(step, message)


def check_compression(wanted: bool | Compression) -> Compression | None:
    """Return the gradient compression that a user asked for; True stands for "fp16", False for none."""
    if wanted is False:
        return None
    if wanted is True:
        return "fp16"
    if wanted not in COMPRESSIONS:
        raise ValueError(f"gradient compression is True, False or one of {list(COMPRESSIONS)}, got {wanted!r}")
    return wanted
