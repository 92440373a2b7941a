# SPDX-License-Identifier: Apache-2.0
"""Inspection of Ray jobs: which process does a job wait for, which rank is late or dead.

`python -m fairlead_inspect why` looks at any job, which needs no library of Fairlead; `look` and `diagnose` do it in a
program. If fairlead-workergroup is installed, a snapshot also has the ranks and coordinates of its groups.
"""

from ._look import label, look
from ._show import fold_stacks, write_report
from ._verdict.rules import diagnose, exit_status
from .model import Evidence, Finding, Frame, Named, Snapshot, StackClass, Suspect, Waiting

__version__ = "0.1.0"

__all__ = [
    "Evidence",
    "Finding",
    "Frame",
    "Named",
    "Snapshot",
    "StackClass",
    "Suspect",
    "Waiting",
    "diagnose",
    "exit_status",
    "fold_stacks",
    "label",
    "look",
    "write_report",
]
