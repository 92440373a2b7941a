# SPDX-License-Identifier: Apache-2.0
"""`python -m fairlead_rollouts`: shows snapshots and journals."""

import argparse
import sqlite3
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from ._show import Picture, as_rows
from ._store.journal import read_steps
from ._store.schema import read_meta, read_prompts, read_samples
from ._store.snapshot import NAME, read_snapshot
from .exceptions import SnapshotError


def draw_snapshot(path: Path) -> Picture:
    """Return what the snapshot of a checkpoint holds."""
    saved = read_snapshot(path)
    settled = saved.settled
    counts = {"open": len(saved.prompts), "applied": settled.applied, "dropped": settled.dropped}
    title = f"Snapshot of step {saved.step} at version {saved.version}, ledger {saved.ledger}"
    lines = (
        f"The next prompt is {saved.next}. Every prompt below {settled.frontier} is applied or dropped.",
        f"{len(saved.samples)} durable samples of open groups are listed.",
    )
    return Picture(title, (("groups", as_rows(counts)),), lines)


def draw_journal(path: Path) -> Picture:
    """Return what a journal holds. No process may use it."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=0)) as database:
            prompts, samples, meta = read_prompts(database), read_samples(database), read_meta(database)
            steps = read_steps(database)
    except sqlite3.Error as error:
        remedy = "A process that uses a journal locks it. Otherwise the file is damaged, or it is neither a snapshot "
        raise SnapshotError(str(path), str(error), f"{remedy}nor a journal.") from None
    versions = sorted(Counter(row[3] for row in samples).items())
    sections = (
        ("groups", (("open", len(prompts)),)),
        ("samples by newest version", as_rows(dict(versions))),
    )
    lines = (f"It holds snapshots of these steps: {', '.join(map(str, steps))}.",) if steps else ()
    return Picture(f"Journal of ledger {meta.get('ledger')}", sections, lines)


def is_journal(path: Path) -> bool:
    """Return whether a file is a journal: SQLite alone, without the checksum that ends a snapshot."""
    return path.is_file() and path.stat().st_size % 512 == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fairlead_rollouts", description=(__doc__ or "").split(": ", 1)[1])
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="show a snapshot or a journal")
    show.add_argument("path", type=Path, help=f"a journal, a {NAME}, or the folder of a checkpoint")
    given = parser.parse_args(arguments)
    try:
        picture = (draw_journal if is_journal(given.path) else draw_snapshot)(given.path)
    except SnapshotError as error:
        sys.stderr.write(f"{error.path}: {error.found}. {error.remedy}\n")
        return 1
    picture.print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
