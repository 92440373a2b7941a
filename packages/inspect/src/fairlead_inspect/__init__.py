# SPDX-License-Identifier: Apache-2.0
"""Inspection of Ray jobs: which process does a job wait for, which rank is late, dead or slow.

`python -m fairlead_inspect why` looks at any job, which needs no library of Fairlead; `look` and `diagnose` do it in a
program. If fairlead-workergroup is installed, this package also keeps the timeline of every group, and watches groups.

>>> from fairlead_inspect import StragglerReport, WorkerTiming
>>> slow = WorkerTiming(3, {"dp": 1}, "train", calls=50, median_s=0.6, ratios={"dp": 1.2}, slow=("dp",))
>>> [one.rank for one in StragglerReport((slow,)).stragglers]
[3]
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._look import label, look
    from ._model import Evidence, Finding, Frame, Named, Snapshot, StackClass, Waiting
    from ._report import write_report
    from ._show import fold_stacks
    from ._stragglers import StragglerReport, WorkerTiming, stragglers
    from ._trace import trace
    from ._verdict.rules import diagnose
    from ._watch import Watch, WorkerEvent, watch

__version__ = "0.1.0"

__all__ = [
    "Evidence",
    "Finding",
    "Frame",
    "Named",
    "Snapshot",
    "StackClass",
    "StragglerReport",
    "Waiting",
    "Watch",
    "WorkerEvent",
    "WorkerTiming",
    "diagnose",
    "fold_stacks",
    "label",
    "look",
    "stragglers",
    "trace",
    "watch",
    "write_report",
]
# Loaded when they are used: those about groups need fairlead-workergroup, and the others need Ray.
_MODULES = {
    **dict.fromkeys(("Evidence", "Finding", "Frame", "Named", "Snapshot", "StackClass", "Waiting"), "._model"),
    **dict.fromkeys(("StragglerReport", "WorkerTiming", "stragglers"), "._stragglers"),
    **dict.fromkeys(("Watch", "WorkerEvent", "watch"), "._watch"),
    **dict.fromkeys(("label", "look"), "._look"),
    "diagnose": "._verdict.rules",
    "fold_stacks": "._show",
    "trace": "._trace",
    "write_report": "._report",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name], __name__), name)
