# SPDX-License-Identifier: Apache-2.0
"""The command line: its arguments and its exit statuses."""

import argparse
import datetime
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray
from rich.console import Group
from rich.text import Text

from fairlead_placement import HeadTimeoutError, PlacementError
from fairlead_placement.extension import Output, add_command, ask_head, attach, list_raylets, run_command

from . import _show
from ._fanout import TIMEOUT_S, WINDOW_S, look_at_cluster, look_here
from ._ray_private import read_spans
from ._timeline import make_timeline
from ._verdict.rules import AFTER_S, diagnose, exit_status
from .model import Finding, Snapshot

_EPILOG = """\
exit status:
  0  done; for `why`: nothing has stood still for as long as --after
  1  `why` found what others wait for
  2  the arguments are wrong
  3  the cluster cannot be reached, wants another token or did not answer, or there is no such job
  4  `why` cannot decide: something does not move, no job runs, or a part that matters could not be read
  130 after Ctrl-C, 141 if the reader of the output has gone
"""
# `--watch` ends if a suspect stands still in so many snapshots, one after the other.
MOST_EQUAL = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status."""
    options = _make_parser().parse_args(arguments)
    output = Output()

    def command() -> int:
        if options.here:
            return int(options.run(options, output))
        try:
            with attach(options.address, timeout_s=options.timeout):
                return int(options.run(options, output))
        except HeadTimeoutError as error:
            raise PlacementError(f"{error} `why --here` looks at one machine without it.") from error

    return run_command(command)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fairlead_inspect",
        description="Names the process that a Ray job waits for, from any machine that reaches its cluster. It asks "
        "neither the driver nor the workers, so it works while they hang or are stopped.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    why = _add(commands, "why", "say whom a job waits for, where that one stands and since when", _why)
    text = f"call a process late that has not moved for so long ({AFTER_S:g})"
    why.add_argument("--after", type=_seconds, default=AFTER_S, metavar="S", help=text)
    text = "look again every S seconds until something hangs (1), or a suspect stands still in 3 snapshots in a row (4)"
    why.add_argument("--watch", type=_seconds, metavar="S", help=text)
    why.add_argument("--report", type=Path, metavar="FILE", help="write the verdict, processes and stacks as HTML")
    _add(commands, "ps", "list the processes of all jobs, with their ranks and whether they move", _ps)
    _add(commands, "stacks", "show where processes stand, equal positions once with their ranks", _stacks)
    timeline = _add(commands, "timeline", "write the calls and tasks of all jobs as a Chrome trace", _timeline)
    text = "the file, such as trace.json"
    timeline.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help=text)
    return parser


def _add(commands: Any, name: str, what: str, run: Any) -> argparse.ArgumentParser:
    parser = add_command(commands, name, what, epilog=_EPILOG)
    parser.set_defaults(run=run, here=False)
    parser.add_argument("--job", metavar="ID", help="only this job; default: all that run")
    parser.add_argument("--timeout", type=_seconds, default=TIMEOUT_S, metavar="S", help=f"of it all ({TIMEOUT_S:g})")
    text = f"between its two parts ({WINDOW_S:g})"
    parser.add_argument("--window", type=_seconds, default=WINDOW_S, metavar="S", help=text)
    if name != "timeline":  # which needs Ray's head, and writes one format
        parser.add_argument("--json", action="store_true", help="print JSON; its fields are stable, see 'schema'")
        parser.add_argument("--here", action="store_true", help="only this machine, without Ray's head")
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}")
    return value


def _look(options: argparse.Namespace) -> Snapshot:
    if options.here:
        return look_here(window_s=options.window, timeout_s=options.timeout)
    snapshot = look_at_cluster(options.job, window_s=options.window, timeout_s=options.timeout)
    if options.job is not None and not snapshot.jobs:
        raise PlacementError(f"There is no running job {options.job!r}.")
    nodes = {node.node_id for node in snapshot.nodes}
    mine = {raylet.address: raylet for raylet in list_raylets() if raylet.user == os.getuid()}
    others = [f"{raylet.address} ({raylet.starter})" for raylet in mine.values() if raylet.node_id not in nodes]
    if options.address == "auto" and others:
        here = ray.get_runtime_context().gcs_address
        note = f"Looked at {here}; also running on this machine: {', '.join(others)}. Choose with --address."
        return replace(snapshot, notes=(note, *snapshot.notes))
    return snapshot


def _why(options: argparse.Namespace, output: Output) -> int:
    stood: dict[object, int] = {}
    while True:
        findings = _why_once(options, output)
        status = exit_status(findings)
        if options.watch is None or status == 1:
            return status
        stood = {suspect: stood.get(suspect, 0) + 1 for suspect in _list_suspects(findings)}
        if MOST_EQUAL in stood.values():
            return status
        time.sleep(options.watch)


def _list_suspects(findings: Iterable[Finding]) -> set[object]:
    """Return who stands still where, by the findings that blame no process; all ranks in one collective are such."""
    suspects = [suspect for finding in findings for suspect in finding.suspects]
    alike = {
        (finding.kind, finding.worker_set, finding.ranks, finding.ordinals)
        for finding in findings
        if finding.kind in ("together", "mismatch") and not (finding.blames or finding.moves)
    }
    return alike | {(suspect.node, suspect.pid or suspect.name, suspect.where) for suspect in suspects}


def _why_once(options: argparse.Namespace, output: Output) -> Sequence[Finding]:
    snapshot = _look(options)
    findings = diagnose(snapshot, after_s=options.after)
    if options.json:
        output.print_json(_show.to_json(snapshot, findings))
    else:
        if options.watch is not None:
            moment = datetime.datetime.fromtimestamp(snapshot.looked_at, datetime.UTC)
            output.print(Text(f"{moment:%Y-%m-%d %H:%M:%S} UTC"))
        output.print(_show.draw_findings(snapshot, findings))
    if options.report is not None:
        try:
            _show.write_report(snapshot, findings, options.report)
        except OSError as error:
            raise PlacementError(f"Cannot write the report: {error}. Name another file with --report.") from error
    return findings


def _ps(options: argparse.Namespace, output: Output) -> int:
    snapshot = _look(options)
    if options.json:
        rows = [row for row, _ in _show.list_processes(snapshot)]
        output.print_json(_show.clean_all({"schema": _show.SCHEMA, "took_s": snapshot.took_s, "processes": rows}))
    else:
        output.print(Group(_show.draw_processes(_show.list_processes(snapshot)), _show.draw_gaps(snapshot)))
    return 0


def _stacks(options: argparse.Namespace, output: Output) -> int:
    classes = _show.fold_stacks(_look(options))
    if options.json:
        output.print_json(_show.clean_all({"schema": _show.SCHEMA, "stacks": [asdict(alike) for alike in classes]}))
    else:
        output.print(_show.draw_stacks(classes))
    return 0


def _timeline(options: argparse.Namespace, output: Output) -> int:
    snapshot = _look(options)
    jobs = [job.job_id for job in snapshot.jobs]
    spans = [span for job in jobs for span in ask_head(f"list the task events of job {job}", read_spans, job)]
    try:
        options.output.write_text(json.dumps(make_timeline(snapshot, spans)), encoding="utf-8")
    except OSError as error:
        raise PlacementError(f"Cannot write the trace: {error}. Name another file with -o.") from error
    running = sum(span.ended is None for span in spans)
    text = f"Wrote {options.output}: {len(spans)} calls and tasks, of which {running} run."
    output.print(Text(f"{text} Open it in https://ui.perfetto.dev."))
    return 0
