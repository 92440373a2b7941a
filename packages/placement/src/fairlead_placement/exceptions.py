# SPDX-License-Identifier: Apache-2.0
"""The errors of this package, one class per situation."""

from dataclasses import dataclass, field

from ._errors import ErrorWithFields, PlacementError, RayVersionError
from ._show import ReservationReport

__all__ = [
    "ErrorWithFields",
    "HeadTimeoutError",
    "PlacementError",
    "PlacementTimeoutError",
    "PortUnavailableError",
    "RayVersionError",
    "ResourceInsufficientError",
]


@dataclass(eq=False, repr=False)
class _Reported(PlacementError):
    """An error that shows what was requested and what was found."""

    reason: str
    report: ReservationReport | None = field(default_factory=lambda: None)

    def __str__(self) -> str:
        return self.reason if self.report is None else f"{self.reason}\n\n{self.report}"


class ResourceInsufficientError(_Reported):
    """The nodes of the cluster cannot hold the request, even when nothing else runs on them.

    If the request would fit but others hold the resources, the reservation waits for them and then raises
    `PlacementTimeoutError`. The exception are particular GPUs (`gpu_ids`): if others hold exactly those, it raises this
    error, and the reason says so.

    Attributes:
        reason: what does not fit and what to do about it.
        report: what was requested, what each node has, and who holds it; None if nothing was to be reserved.
    """


class PlacementTimeoutError(_Reported, TimeoutError):
    """The request would fit, but others held the resources until the deadline; or a node's agent was too slow.

    Attributes:
        reason: what was not free in time and what to do about it.
        report: what was requested, what each node has, and who holds it; None if nothing was to be reserved.
    """


class HeadTimeoutError(PlacementTimeoutError):
    """Ray's head (GCS) did not answer a request in time. The request is sent, and may still take effect.

    Placement groups that had to be removed are removed in the background once the head answers again.

    Attributes:
        reason: what was requested, how long this process waited, and what to do.
        report: None.
    """


@dataclass(eq=False, repr=False)
class PortUnavailableError(PlacementError, RuntimeError):
    """Too few ports of a range could be leased on a node. Nothing stays leased.

    Attributes:
        node_ip: address of the node.
        count: how many ports were requested.
        low: first port of the range.
        high: last port of the range, included.
        leased: how many of the range this job's agent has leased.
        in_use: how many ports of the range other processes have bound.
    """

    node_ip: str
    count: int
    low: int
    high: int
    leased: int
    in_use: int

    def __str__(self) -> str:
        return (
            f"{self.count} port(s) in {self.low}-{self.high} were asked for on {self.node_ip}, but of these "
            f"{self.high - self.low + 1} ports {self.leased} are leased by this job's agent and {self.in_use} "
            "are, or were a moment ago, bound by other processes. Release leases (shut groups and clusters down) or "
            "give a wider range (port_range_low, port_range_high)."
        )
