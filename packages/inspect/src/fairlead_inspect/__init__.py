# SPDX-License-Identifier: Apache-2.0
"""Inspection of worker groups: which rank is late, dead or slow, and what has each one done lately.

An installed fairlead-inspect keeps the timeline of every group. `python -m fairlead_inspect why` looks at the groups of
a cluster while their drivers and workers hang.

>>> from fairlead_inspect import StragglerReport, WorkerTiming
>>> slow = WorkerTiming(3, {"dp": 1}, "train", calls=50, median_s=0.6, ratios={"dp": 1.2}, slow=("dp",))
>>> [one.rank for one in StragglerReport((slow,)).stragglers]
[3]
"""

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
