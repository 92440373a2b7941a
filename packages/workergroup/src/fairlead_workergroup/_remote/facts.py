# SPDX-License-Identifier: Apache-2.0
"""The change of the facts about a worker that keeps running, such as the size of its group."""

import os
import sys
from collections.abc import Mapping
from typing import Any


def apply_facts(worker: Any, changes: Mapping[str, Any], layout: Any = None) -> None:
    """Publish changed facts about this worker, in the variables of its environment too.

    Args:
        worker: the user's instance, which is not used.
        changes: the facts that change; `env` has the variables that change.
        layout: the axes over the ranks as plain data; None if they stay.
    """
    published = sys.modules["_fairlead_worker"]
    before: dict[str, Any] = published.facts
    env = changes.get("env", {})
    os.environ.update(env)
    # A new dict: code that holds the facts of one epoch must not see those of the next one in it.
    facts = {**before, **changes, "env": {**before["env"], **env}}
    published.facts = facts if layout is None else {**facts, "layout": layout}  # type: ignore[attr-defined]


def do_nothing(worker: Any) -> None:
    """Return when everything that was sent to this worker before has ended."""
