# SPDX-License-Identifier: Apache-2.0
"""Inspection of Ray jobs: which process does a job wait for, which rank is late, dead or slow.

`python -m fairlead_inspect why` looks at any job, which needs no library of Fairlead. If fairlead-workergroup is
installed, this package also keeps the timeline of every group, and watches groups.

>>> from fairlead_inspect import StragglerReport, WorkerTiming
>>> slow = WorkerTiming(3, {"dp": 1}, "train", calls=50, median_s=0.6, ratios={"dp": 1.2}, slow=("dp",))
>>> [one.rank for one in StragglerReport((slow,)).stragglers]
[3]
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._stragglers import StragglerReport, WorkerTiming, stragglers
    from ._trace import trace
    from ._watch import Watch, WorkerEvent, watch

__version__ = "0.1.0"

__all__ = [
    "StragglerReport",
    "Watch",
    "WorkerEvent",
    "WorkerTiming",
    "stragglers",
    "trace",
    "watch",
]
# All of them are about groups, which the command line does without.
_MODULES = {"trace": "._trace", **dict.fromkeys(("Watch", "WorkerEvent", "watch"), "._watch")}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "._stragglers"), __name__), name)
