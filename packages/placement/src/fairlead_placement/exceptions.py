# SPDX-License-Identifier: Apache-2.0
"""What can go wrong while a place is being found, one class per situation."""

from ._show.report import Report

__all__ = ["PlacementError", "PlacementTimeoutError", "PortUnavailableError", "ResourceInsufficientError"]


class PlacementError(Exception):
    """Base of everything this package raises once Ray has been asked for something.

    Misuse that can be seen without asking Ray is a ValueError or a TypeError instead.
    """


class _Reported(PlacementError):
    """An error that shows what was asked and what was found."""

    def __init__(self, reason: str, report: Report | None = None) -> None:
        super().__init__(reason, report)
        self.reason = reason
        self.report = report

    def __str__(self) -> str:
        return self.reason if self.report is None else f"{self.reason}\n\n{self.report}"


class ResourceInsufficientError(_Reported):
    """The nodes that are there cannot hold the request, even when nothing else runs on them.

    You do not get this when the request would fit but others hold the resources: that is waited for, and ends
    as `PlacementTimeoutError`. Except for particular GPUs (`gpu_ids`): others hold exactly those, as the reason says.

    Attributes:
        reason: one sentence: what does not fit and what to do about it.
        report: what was asked, what each node has, who holds it; None where nothing was to be reserved.
    """


class PlacementTimeoutError(_Reported, TimeoutError):
    """The request would fit, but did not become possible within the deadline; or a node's agent did not answer in time.

    Attributes:
        reason: one sentence: what was not free in time and what to do about it.
        report: what was asked, what each node has, who holds it; None where nothing was to be reserved.
    """


class PortUnavailableError(PlacementError):
    """Too few ports of a range could be leased on a node. Nothing stays leased.

    Attributes:
        node_ip: address of the node.
        count: how many ports were asked for.
        low: first port of the range.
        high: last port of the range, included.
        leased: how many of the range this job's agent has leased.
        in_use: how many others have bound.
    """

    def __init__(self, node_ip: str, count: int, low: int, high: int, leased: int, in_use: int) -> None:
        super().__init__(node_ip, count, low, high, leased, in_use)
        self.node_ip = node_ip
        self.count = count
        self.low = low
        self.high = high
        self.leased = leased
        self.in_use = in_use

    def __str__(self) -> str:
        return (
            f"{self.count} port(s) in {self.low}-{self.high} were asked for on {self.node_ip}, but of these "
            f"{self.high - self.low + 1} ports {self.leased} are leased by this job's agent and {self.in_use} "
            "are, or were a moment ago, bound by other processes. Release leases (shut groups and clusters down) or "
            "give a wider range (port_range_low, port_range_high)."
        )
