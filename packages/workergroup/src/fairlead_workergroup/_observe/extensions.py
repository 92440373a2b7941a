# SPDX-License-Identifier: Apache-2.0
"""Extensions of worker groups: installed packages that observe calls and add code to workers.

A package names a function in the entry point group `fairlead_workergroup.extensions`. It is called with each group that
this process makes, before its workers start, with each handle that is used here, and with the group's id. An extension
that raises is reported once, and the group works without it.
"""

import functools
import importlib.metadata
import logging
from collections.abc import Callable
from typing import Any

ENTRY_POINTS = "fairlead_workergroup.extensions"
logger = logging.getLogger("fairlead_workergroup")

Extension = Callable[[Any, str], object]


@functools.cache
def load_extensions() -> list[tuple[str, Extension]]:
    """Return the installed extensions with their names. Those that cannot be imported are reported and left out."""
    found = []
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            found.append((entry.value, entry.load()))
        except Exception:
            logger.warning("The extension %s of worker groups cannot be imported.", entry.value, exc_info=True)
    return found


def extend(group: object, group_id: str) -> None:
    """Let the extensions see a new group or handle; one that raises is not used any more in this process."""
    extensions = load_extensions()
    for one in list(extensions):
        name, extension = one
        try:
            extension(group, group_id)
        except Exception:
            extensions[:] = [other for other in extensions if other is not one]
            logger.warning("The extension %s of worker groups failed. It is not used any more.", name, exc_info=True)
