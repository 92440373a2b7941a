# SPDX-License-Identifier: Apache-2.0
"""What a thread waits for inside of Fairlead, from the variables of the function in which it does. Shipped by value."""

import re
import time
from collections.abc import Sequence
from typing import Any

# The functions in which Fairlead waits, each with the names of four variables: the request, what it lacks, the begin of
# the wait in `time.monotonic`, and its limit in seconds. A name is empty if there is no such variable.
FUNCTIONS = {
    "fairlead_placement/_reserve/wait.py reserve": ("wants", "lacks", "began", "limit"),
    "fairlead_placement/_nodes/ports.py lease_ports": ("", "", "began", "timeout_s"),
    "fairlead_workergroup/_membership/provision.py wait_started": ("name", "", "began", ""),
}
# A variable that has no value yet does not match.
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
