# SPDX-License-Identifier: Apache-2.0
"""A report about a look as one page, to attach to a bug: the verdict, the processes, and where they stand."""

import datetime
import html
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType

from ._model import Finding, Snapshot
from ._show import draw_findings, draw_processes, draw_stacks, fold_stacks, list_processes, to_json

# Wide enough that few lines are broken.
WIDTH = 160
_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font-family: system-ui, sans-serif; margin: 2rem; color-scheme: light; color: #1a1a1a; background: #fff; }}
pre {{ font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 13px; line-height: 1.35; overflow-x: auto; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>Looked at {looked_at} for {took_s:.1f} s. Values that look like a token or a password are redacted.</p>
{sections}
<h2>As data</h2>
<details><summary>JSON of <code>python -m fairlead_inspect why --json</code></summary>
<pre>{data}</pre></details>
</body>
</html>
"""


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
    Path(path).write_text(draw_report(snapshot, findings), encoding="utf-8")


def draw_report(snapshot: Snapshot, findings: Sequence[Finding], *more: RenderableType) -> str:
    """Return the page, with more verdicts below that about the findings."""
    parts = [
        ("Verdict", [draw_findings(snapshot, findings, verbose=True), *more]),
        ("Processes", [draw_processes(list_processes(snapshot))]),
        ("Where they stand", [draw_stacks(fold_stacks(snapshot))]),
    ]
    moment = datetime.datetime.fromtimestamp(snapshot.looked_at, datetime.UTC)
    return _PAGE.format(
        title="What a Ray job waits for",
        looked_at=f"{moment:%Y-%m-%d %H:%M:%S} UTC",
        took_s=snapshot.took_s,
        sections="\n".join(f"<h2>{heading}</h2>\n<pre>{_as_html(shown)}</pre>" for heading, shown in parts),
        data=html.escape(json.dumps(to_json(snapshot, findings), indent=1)),
    )


def _as_html(shown: Sequence[RenderableType]) -> str:
    """Return pictures as the content of a `pre`, escaped and with their colours."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for one in shown:
        console.print(one)
    return "\n".join(
        line.rstrip() for line in console.export_html(inline_styles=True, code_format="{code}").split("\n")
    )
