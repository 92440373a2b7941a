# SPDX-License-Identifier: Apache-2.0
"""The change of the facts about a worker that keeps running."""

import os
import sys
from collections.abc import Mapping
from typing import Any


def apply_facts(worker: Any, changes: Mapping[str, Any], layout: Any = None) -> None:
    """Publish changed facts about this worker, and a changed layout, in the variables of its environment too."""
    published = sys.modules["_fairlead_worker"]
    before: dict[str, Any] = published.facts
    # A process keeps the devices that it sees, and so its LOCAL_RANK, if that is their index.
    env = {name: value for name, value in changes.get("env", {}).items() if name not in before.get("fixed", ())}
    os.environ.update(env)
    # A new dict: code that holds the facts of one epoch must not see those of the next one in it.
    facts = {**before, **changes, "env": {**before["env"], **env}}
    published.facts = facts if layout is None else {**facts, "layout": layout}  # type: ignore[attr-defined]


def do_nothing(worker: Any) -> None:
    """Return when everything that was sent to this worker before has ended."""
