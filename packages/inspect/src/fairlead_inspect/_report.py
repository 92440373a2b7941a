# SPDX-License-Identifier: Apache-2.0
"""A report about a look as one page, to attach to a bug: the verdict, the processes, and where they stand."""

import datetime
import io
import os
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from ._show import draw_findings, draw_processes, draw_stacks, fold_stacks, list_processes
from .model import Finding, Snapshot

# Wide enough that few lines are broken.
WIDTH = 160


def write_report(snapshot: Snapshot, findings: Sequence[Finding], path: str | os.PathLike[str]) -> None:
    """Write a look and its verdict as one HTML file that loads nothing from elsewhere.

    Values that look like a token or a password are redacted, and texts of the job are escaped.

    Args:
        snapshot: a look that `look` returned.
        findings: its verdict, which `diagnose` returned.
        path: the file, which is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    moment = datetime.datetime.fromtimestamp(snapshot.looked_at, datetime.UTC)
    redacted = "Values that look like a token or a password are redacted."
    console.print(Text(f"What a Ray job waits for, on {moment:%Y-%m-%d %H:%M:%S} UTC. {redacted}"))
    for heading, shown in (
        ("Verdict", draw_findings(snapshot, findings, verbose=True)),
        ("Processes", draw_processes(list_processes(snapshot))),
        ("Where they stand", draw_stacks(fold_stacks(snapshot))),
    ):
        console.print(Text(f"\n{heading}\n", style="bold underline"), shown, sep="")
    console.save_html(os.fspath(path))
