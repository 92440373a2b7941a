# SPDX-License-Identifier: Apache-2.0
"""The statistics of a ledger as OpenTelemetry metrics. Needs the extra `metrics`."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from ._ledger import Ledger
from ._show import STATES
from ._statistics import Statistics

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation

__all__ = ["export"]

# The name of each counter after the prefix, the attribute that its parts have, and what it counts.
COUNTERS = (
    ("staleness", "versions", "Claimed groups by staleness"),
    ("drops", "reason", "Dropped groups by reason"),
    ("requeued", "attempt", "Groups that became too old and were requeued, by the attempt that was lost"),
    ("versions_in_flight", "", "Staleness of claimed groups that passed during generation"),
    ("versions_in_queue", "", "Staleness of claimed groups that passed in the queue"),
    ("attempts", "", "Attempts of applied groups"),
    ("regenerated", "", "Finished samples that were released to be generated again"),
    ("fenced", "", "Late results that were refused"),
    ("waits", "", "Claims that had to wait for older groups"),
)
GAUGES = (
    ("groups", "state", "Groups in each state"),
    ("version", "", "Version of the trainer"),
    ("room", "", "Groups that may be leased now"),
    ("oldest_open", "", "Age in versions of the oldest open group"),
)
PREFIX = "fairlead.rollouts."


def export(ledger: Ledger, meter: "Meter | None" = None) -> None:
    """Register observable instruments `fairlead.rollouts.*` that read the statistics of a ledger.

    The exporter of the process reads them, such as that of Prometheus, also from another thread.

    Args:
        ledger: the ledger.
        meter: makes the instruments; by default the meter `fairlead_rollouts` of the global provider.

    >>> from opentelemetry.sdk.metrics import MeterProvider  # doctest: +SKIP
    >>> export(ledger, MeterProvider(readers).get_meter("job"))  # doctest: +SKIP
    """
    from opentelemetry.metrics import get_meter

    meter = get_meter("fairlead_rollouts") if meter is None else meter
    for make, instruments in ((meter.create_observable_gauge, GAUGES), (meter.create_observable_counter, COUNTERS)):
        for name, attribute, description in instruments:
            make(PREFIX + name, [_reader(ledger, name, attribute)], description=description)


def _reader(ledger: Ledger, name: str, attribute: str) -> "Callable[[CallbackOptions], Iterable[Observation]]":
    from opentelemetry.metrics import Observation

    def read(options: "CallbackOptions") -> "Iterable[Observation]":
        value = read_values(ledger.statistics(), name)
        return [Observation(count, {attribute: part} if attribute else {}) for part, count in value.items()]

    return read


def read_values(numbers: Statistics, name: str) -> Mapping[str | int, int]:
    """Return the values of an instrument by the value of its attribute, `""` without one."""
    if name == "groups":
        return {state: getattr(numbers, state) for state in STATES}
    value = getattr(numbers, name)
    if isinstance(value, Mapping):
        return value
    return {} if value is None else {"": value}
