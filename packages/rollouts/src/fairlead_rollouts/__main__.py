# SPDX-License-Identifier: Apache-2.0
"""`python -m fairlead_rollouts show PATH`: shows a snapshot."""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ._book import APPLIED, DROPPED
from ._snapshot import NAME, read_snapshot
from ._statistics import draw_bars
from .exceptions import SnapshotError

FATES = {"open": 0, "applied": APPLIED, "dropped": DROPPED}


def describe(path: Path) -> str:
    """Return what a snapshot holds."""
    saved = read_snapshot(path)
    samples = [sample for group in saved.groups for sample in group[4]]
    moment = "after the last change" if saved.step is None else f"of step {saved.step}"
    following, first_open = len(saved.fates), saved.fates.find(FATES["open"])
    bound = following if first_open < 0 else first_open
    parts = [
        f"Snapshot {moment} at version {saved.version}",
        draw_bars("groups", {name: saved.fates.count(fate) for name, fate in FATES.items()}),
        f"The next prompt is {following}. Every prompt below {bound} is applied or dropped.",
        f"{len(samples)} durable samples of open groups are listed.",
    ]
    if saved.step is None:
        parts.append(f"A resume can begin after any step from {max(0, saved.bounds[0])} to {saved.bounds[1]}.")
    if samples:
        versions = Counter(sample.newest_version for sample in samples)
        parts.append(draw_bars("samples by newest version", dict(sorted(versions.items()))))
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fairlead_rollouts", description=(__doc__ or "").split(": ", 1)[1])
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="show a snapshot")
    show.add_argument("path", type=Path, help=f"the file of a ledger, a {NAME}, or the folder of a checkpoint")
    given = parser.parse_args(arguments)
    try:
        sys.stdout.write(f"{describe(given.path)}\n")
    except SnapshotError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
