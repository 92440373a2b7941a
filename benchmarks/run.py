# SPDX-License-Identifier: Apache-2.0
"""Run the benchmarks, print their tables and write them to benchmarks/RESULTS.md. Fail if a row misses its bound."""

import argparse
import datetime
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import bench_batching
import bench_calls
import bench_elastic
import bench_inspect
import bench_peers
import bench_placement
import bench_rollouts
import bench_scale
import bench_sharding
import bench_tpu_executor
import bench_transfer
import bench_venvs
import bench_workergroup
import ray
from _measure import NOMINAL_S, table

MODULES = {
    "sharding": bench_sharding,
    "batching": bench_batching,
    "placement": bench_placement,
    "venvs": bench_venvs,
    "workergroup": bench_workergroup,
    "workergroup calls": bench_calls,
    "workergroup at scale": bench_scale,
    "workergroup that changes": bench_elastic,
    "tpu-executor": bench_tpu_executor,
    "inspect": bench_inspect,
    "transfer": bench_transfer,
    "rollouts": bench_rollouts,
    # Needs verl: `nox -s bench -- peers` installs it.
    "peers": bench_peers,
}


HEAD = (
    "Ratios within one run, in turns, medians with quartiles. Compare ratios, not times: the machine is shared.",
    (
        f"Limits in seconds hold for a machine that sorts and looks up 50,000 names in {NOMINAL_S * 1e3:g} ms. The "
        "factor after a limit says how much longer this machine took then."
    ),
    "`nox -s bench` writes this file; `nox -s bench -- venvs` the part of one package.",
)


def machine() -> str:
    """Return the day, the commit, the load and the machine of a run."""
    folder = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{datetime.date.today()}, commit {commit.stdout.strip() or 'unknown'}, load {os.getloadavg()[0]:.1f}, "
        f"{os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}, Ray {ray.__version__}"
    )


def read_results(text: str) -> tuple[str, dict[str, str]]:
    """Return what the last run of all benchmarks says of its machine, and the sections by package."""
    head, *parts = text.split("\n## fairlead-")
    last = head.strip().rpartition("\n")[2]
    of_all = last if last[:2] == "20" else "Each section names its machine."
    return of_all, {name: body.strip() for name, _, body in (part.partition("\n") for part in parts)}


def main() -> None:
    # Ray's test clusters announce themselves in the session folder, where drivers of other programs would find them.
    with tempfile.TemporaryDirectory(prefix="fl-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ.setdefault("RAY_TMPDIR", folder)
        measure()


def measure() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "packages",
        nargs="*",
        choices=[[], *MODULES],
        help="packages to measure (default: all); the sections of other packages are kept",
    )
    has_verl = importlib.util.find_spec("verl") is not None
    asked = parser.parse_args().packages
    chosen = asked or [name for name in MODULES if name != "peers" or has_verl]
    results = Path(__file__).with_name("RESULTS.md")
    header = machine()
    of_all, known = read_results(results.read_text()) if results.exists() else ("", {})
    if not asked:  # their machine stands once above all sections
        of_all, known = header, {name: text for name, text in known.items() if name not in chosen}
    missed = []
    for name in chosen:
        rows = list(MODULES[name].rows())
        missed += [
            f"{name}: {row.what.strip()}: {row.measured}, must reach {row.must_reach}" for row in rows if not row.ok
        ]
        text = table(rows)
        print(f"\n{name}\n{text}", flush=True)
        describe = getattr(MODULES[name], "describe", None)
        own = ", ".join([*([header] if asked else []), *([describe()] if describe else [])])
        known[name] = f"{own}\n\n{text}".strip()
        parts = [
            "# Measured",
            *HEAD,
            of_all,
            *(f"## fairlead-{key}\n\n{known[key]}" for key in MODULES if key in known),
        ]
        results.write_text("\n\n".join(parts) + "\n")
    if missed:
        sys.exit("\n".join(["Some rows missed their bounds:", *missed]))


if __name__ == "__main__":
    main()
