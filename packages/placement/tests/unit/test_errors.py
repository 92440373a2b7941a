# SPDX-License-Identifier: Apache-2.0
"""Errors can be pickled, and their tables show names literally."""

import pickle

import pytest

from fairlead_placement import (
    Node,
    PlacementError,
    PlacementTimeoutError,
    PortUnavailableError,
    ReservationReport,
    ResourceHolder,
    ResourceInsufficientError,
)
from fairlead_placement._model import Ask

NODE = Node("abcdefghij", "10.0.0.1", {"CPU": 4.0, "GPU": 1.0, "x[/y]": 2.0}, {"CPU": 1.5}, {})
HOLDER = ResourceHolder(
    "placement group", "a[/b]:cat:", "1234567890", "01000000", {"abcdefghij": ({"CPU": 1.0}, {"CPU": 1.0})}
)
REPORT = ReservationReport(
    (Ask(0, 3, {"CPU": 1.0}), Ask(1, 3, {"CPU": 1.0}), Ask(3, 3, {"x[/y]": 0.5})), (NODE,), (HOLDER,)
)

SHOWN = """\
Requested
┏━━━━━━━━━━━━━━┳━━━━━━━━━┳━━━━━━━━━━━┳━━━━━━━━━━━━━┓
┃ logical node ┃ bundles ┃ each      ┃ strategy    ┃
┡━━━━━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━━━━━╇━━━━━━━━━━━━━┩
│ 0 to 1       │ 3       │ 1 CPU     │ STRICT_PACK │
│ 3            │ 3       │ 0.5 x[/y] │ STRICT_PACK │
└──────────────┴─────────┴───────────┴─────────────┘
Found
┏━━━━━━━━━━┳━━━━━━━━━━┳━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┓
┃ node     ┃ address  ┃ total          ┃ free             ┃ held by                                          ┃
┡━━━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┩
│ abcdefgh │ 10.0.0.1 │ 4 CPU, 2 x[/y] │ 1.5 CPU, 0 x[/y] │ placement group a[/b]:cat: 12345678 (job         │
│          │          │                │                  │ 01000000): 2 x 1 CPU                             │
│          │          │                │                  │ tasks, or actors that are starting: 0.5 CPU, 2   │
│          │          │                │                  │ x[/y]                                            │
└──────────┴──────────┴────────────────┴──────────────────┴──────────────────────────────────────────────────┘
It does not fit on the present nodes, even when nothing else runs."""

ERRORS = [
    PlacementError("no"),
    ResourceInsufficientError("too much"),
    ResourceInsufficientError("too much", REPORT),
    PlacementTimeoutError("taken", REPORT),
    PortUnavailableError("10.0.0.1", 2, 1400, 1401, 1, 1),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_pickle(error):
    """An error has the same class, message and attributes after pickling."""
    twin = pickle.loads(pickle.dumps(error))

    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert twin.args == error.args
    assert vars(twin) == vars(error)
    assert isinstance(twin, PlacementError)


def test_report():
    """The table merges equal neighbours, shows only requested resources, and does not parse names as markup."""
    assert str(REPORT) == SHOWN
    assert "Found no node that is alive." in str(ReservationReport(REPORT.asks, ()))
    assert str(ERRORS[2]) == f"too much\n\n{REPORT}"
