# SPDX-License-Identifier: Apache-2.0
"""Check any framework's buffer and checkpoints against losses that others have reported.

Write a `System` of eight methods over your own buffer, and print the report:

    print(check(MySystem))

With pytest, each case is a test:

    pytest -p fairlead_rollouts.conformance.plugin --pyargs fairlead_rollouts.conformance.suite --system module:MySystem
"""

from .cases import CASES, Case, Report, Verdict, check
from .system import Job, Step, System, Work

__all__ = ["CASES", "Case", "Job", "Report", "Step", "System", "Verdict", "Work", "check"]
