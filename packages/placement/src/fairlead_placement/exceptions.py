# SPDX-License-Identifier: Apache-2.0
"""The errors of this package, one class per situation."""

from dataclasses import dataclass, field, fields

from ._show import ReservationReport


class ErrorWithFields(Exception):
    """Base of errors that are dataclasses: their fields are their arguments, so that a copy has all of them.

    Defaults come from factories. A default that is an attribute of the class would hide the field's value in the error
    that Ray makes of this one: it does not run `__init__`, and looks up only what the class does not have.
    """

    def __post_init__(self) -> None:
        # An OSError, which a TimeoutError is, would keep only two of them, and take them for an errno and its text.
        Exception.__init__(self, *(getattr(self, entry.name) for entry in fields(self)))  # type: ignore[arg-type]


class PlacementError(ErrorWithFields):
    """Base of the errors that this package raises after it has sent a request to Ray.

    Misuse that can be detected before that is a ValueError or a TypeError instead.
    """


@dataclass(eq=False, repr=False)
class _Reported(PlacementError):
    """An error with a table of what was requested and what was found."""

    reason: str
    report: ReservationReport | None = field(default_factory=lambda: None)

    def __str__(self) -> str:
        return self.reason if self.report is None else f"{self.reason}\n\n{self.report}"


class ResourceInsufficientError(_Reported):
    """The nodes of the cluster cannot hold the request, even when nothing else runs on them.

    It is also raised if others held exactly the GPUs of `gpu_ids` until the deadline, and the reason says so.

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
    """


@dataclass(eq=False, repr=False)
class PortUnavailableError(PlacementError, RuntimeError):
    """Too few ports of a range could be leased on a node. Nothing stays leased.

    Attributes:
        node_ip: address of the node.
        count: how many ports were requested.
        low: first port of the range.
        high: last port of the range, included.
        leased: how many of the range this process has leased there.
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
            f"{self.count} port(s) in {self.low}-{self.high} were requested on {self.node_ip}, but of these "
            f"{self.high - self.low + 1} ports {self.leased} are leased by this process and {self.in_use} "
            "are, or were a moment ago, bound by other processes. Release leases (shut groups and clusters down) or "
            "give a wider range (port_range_low, port_range_high)."
        )
