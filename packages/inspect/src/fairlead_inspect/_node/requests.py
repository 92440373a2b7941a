# SPDX-License-Identifier: Apache-2.0
"""What a thread waits for inside of Fairlead, from the variables of the function in which it does. Shipped by value."""

import re
import time
from collections.abc import Sequence
from typing import Any

# The functions in which Fairlead waits, and their variables: what is wanted, what is missing, since when by
# `time.monotonic`, and for how many seconds at most.
FUNCTIONS = {
    "fairlead_placement/_reserve/wait.py reserve": ("wants", "lacks", "began", "limit"),
    "fairlead_placement/_nodes/ports.py lease_ports": ("", "", "began", "timeout_s"),
    "fairlead_workergroup/_membership/provision.py wait_started": ("name", "", "began", ""),
}
# What `reserve` says before it has looked is not there.
_NUMBER = re.compile(r"\d[\d.e+-]*")


def read_request(frames: Sequence[Any]) -> tuple[str, str, str, float | None, float | None] | None:
    """Return the function of Fairlead that a thread waits in, what it wants and lacks, its age and limit in seconds."""
    for frame in frames:
        place = "/".join(frame["filename"].split("/")[-3:]) + " " + frame["name"]
        if (names := FUNCTIONS.get(place)) is not None:
            held = {local["name"]: local.get("repr") or "" for local in frame.get("locals") or []}
            wants, lacks, began, limit = (held.get(name, "") for name in names)
            since_s = time.monotonic() - float(began) if _NUMBER.fullmatch(began) else None
            limit_s = float(limit) if _NUMBER.fullmatch(limit) else None
            return frame["name"], wants.strip('"'), lacks.strip('"'), since_s, limit_s
    return None
