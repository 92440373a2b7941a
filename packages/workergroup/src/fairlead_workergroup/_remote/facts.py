# SPDX-License-Identifier: Apache-2.0
"""The change of the facts about a worker that keeps running, and the preparation of a process without facts."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .describe import load
from .devices import show_devices
from .host import add_to_path
from .process import start_tick


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


def warm_up(
    worker: Any, variables: Mapping[str, str], path: Sequence[str], target: str | bytes, devices: Mapping[str, Any]
) -> dict[str, Any]:
    """Import a class with the variables of its workers, except those of a rank; return pid and start tick."""
    os.environ.update(variables)
    show_devices(devices, variables)
    add_to_path(path)
    load(target)
    return {"pid": os.getpid(), "started": start_tick(os.getpid())}
