# SPDX-License-Identifier: Apache-2.0
"""Inspection of Ray jobs: which process does a job wait for, which rank is late or dead.

`python -m fairlead_inspect why` looks at any job, which needs no library of Fairlead; `look` and `diagnose` do it in a
program. If fairlead-workergroup is installed, this package also keeps the timeline of every group.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._look import label, look
    from ._model import Evidence, Finding, Frame, Named, Snapshot, StackClass, Waiting
    from ._report import write_report
    from ._show import fold_stacks
    from ._trace import trace
    from ._verdict.rules import diagnose

__version__ = "0.1.0"

__all__ = [
    "Evidence",
    "Finding",
    "Frame",
    "Named",
    "Snapshot",
    "StackClass",
    "Waiting",
    "diagnose",
    "fold_stacks",
    "label",
    "look",
    "trace",
    "write_report",
]
# Loaded when they are used: those about groups need fairlead-workergroup, and the others need Ray.
_MODULES = {
    **dict.fromkeys(("Evidence", "Finding", "Frame", "Named", "Snapshot", "StackClass", "Waiting"), "._model"),
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
