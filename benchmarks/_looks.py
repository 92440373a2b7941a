# SPDX-License-Identifier: Apache-2.0
"""Look at a job as `why --watch` does, once for each line of the input: `python _looks.py ADDRESS JOB`.

Prints a line of JSON for each look, and one before the first.
"""

import json
import os
import sys
import time
from pathlib import Path


def read_peak_mb() -> float:
    """Return the largest resident memory that this process has had, in MB."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def main(address: str, job: str) -> None:
    import ray

    from fairlead_inspect import diagnose, look
    from fairlead_placement import init_ray

    began = time.perf_counter()
    init_ray(address=address)
    print(json.dumps({"pid": os.getpid(), "attached_s": time.perf_counter() - began}), flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        snapshot = look(job=job, timeout_s=30.0)
        findings = diagnose(snapshot, after_s=2.0)
        answer = {
            "took_s": time.perf_counter() - began,
            "read": sum(bool(one.threads) for one in snapshot.processes),
            "blamed": [(one.kind, one.ranks) for one in findings if one.blames],
            "notes": snapshot.notes,
            "peak_mb": read_peak_mb(),
        }
        print(json.dumps(answer), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
