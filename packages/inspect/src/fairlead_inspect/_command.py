# SPDX-License-Identifier: Apache-2.0
"""The command line: its arguments and its exit statuses."""

import argparse
import contextlib
import datetime
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from fairlead_placement import HeadTimeoutError, PlacementError
from fairlead_placement.extension import Output, add_command, ask_head, attach, run_command

from ._arguments import new_file, seconds
from ._chrome import write_file
from ._fanout import TIMEOUT_S, WINDOW_S, look_at_cluster, look_here
from ._job_trace import make_job_trace
from ._ray_private import read_spans
from ._report import write_report
from ._show import (
    SCHEMA,
    clean_all,
    draw_findings,
    draw_gaps,
    draw_processes,
    draw_stacks,
    fold_stacks,
    list_processes,
    to_fields,
    to_json,
)
from ._verdict.rules import AFTER_S, diagnose, exit_status
from .model import Finding, Snapshot

_EPILOG = """\
exit status:
  0  done; for `why`: nothing is wrong
  1  `why` found what others wait for
  2  the arguments are wrong
  3  the cluster cannot be reached, wants another token or did not answer, or there is no such job
  4  `why` cannot decide: something does not move, or a part that matters could not be read
  130 after Ctrl-C, 141 if the reader of the output has gone
"""


# `--watch` ends if it lists the same suspects in so many snapshots, one after the other.
MOST_EQUAL = 3


class CommandError(Exception):
    """No job of the cluster has the given id, or the report cannot be written."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status."""
    options = _make_parser().parse_args(arguments)
    output = Output()

    def command() -> int:
        if getattr(options, "here", False):
            return int(options.run(options, output))
        try:
            with _attach(options.address, getattr(options, "timeout", None)):
                return int(options.run(options, output))
        except HeadTimeoutError as error:
            hint = " `why --here` looks at one machine without it." if hasattr(options, "here") else ""
            raise PlacementError(f"{error}{hint}") from error

    return run_command(command, CommandError)


@contextlib.contextmanager
def _attach(address: str, timeout_s: float | None) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        with _show_wait("Attaching to the cluster"):
            stack.enter_context(attach(address, timeout_s=timeout_s))
        yield


def _show_wait(text: str) -> contextlib.AbstractContextManager[object]:
    """Return a context manager that shows on a terminal that something takes its time."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return contextlib.nullcontext()
    # `attach` redirects the standard output itself.
    return Live(Spinner("dots", text), console=console, transient=True, redirect_stdout=False, redirect_stderr=False)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fairlead_inspect",
        description="Names the process that a Ray job waits for, from any machine that reaches its cluster. It asks "
        "neither the driver nor the workers, so it works while they hang or are stopped.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    why = _add(commands, "why", "say whom a job waits for, where that one stands and since when")
    why.add_argument(
        "--after", type=seconds, metavar="S", help=f"call a process late that has not moved for so long ({AFTER_S:g})"
    )
    why.add_argument(
        "--watch",
        type=seconds,
        metavar="S",
        help="look again every S seconds until something hangs (1), or "
        "the same suspects have stood still in 3 snapshots (4)",
    )
    why.add_argument(
        "--report", type=new_file, metavar="FILE", help="write the verdict, the processes and their stacks as HTML"
    )
    why.add_argument("-v", "--verbose", action="store_true", help="print all evidence")
    why.set_defaults(run=_why)
    _add(commands, "ps", "list the processes of all jobs, with their ranks and whether they move").set_defaults(run=_ps)
    _add(commands, "stacks", "show where processes stand, equal positions once with their ranks").set_defaults(
        run=_stacks
    )
    timeline = _add(
        commands, "timeline", "write the calls and tasks of all jobs as a Chrome trace", here=False, json=False
    )
    timeline.add_argument(
        "-o", "--output", type=new_file, required=True, metavar="FILE", help="the file, such as trace.json"
    )
    timeline.set_defaults(run=_timeline, here=False)
    return parser


def _add(commands: Any, name: str, what: str, *, here: bool = True, json: bool = True) -> argparse.ArgumentParser:
    parser = add_command(commands, name, what, epilog=_EPILOG, json=json)
    parser.add_argument("--job", metavar="ID", help="only this job; default: all that run")
    parser.add_argument("--timeout", type=seconds, default=TIMEOUT_S, metavar="S", help=f"of a look ({TIMEOUT_S:g})")
    parser.add_argument(
        "--window", type=seconds, default=WINDOW_S, metavar="S", help=f"between its two parts ({WINDOW_S:g})"
    )
    if here:
        parser.add_argument("--here", action="store_true", help="only this machine, without Ray's head")
    return parser


def _look(options: argparse.Namespace) -> Snapshot:
    text = f"Looking at processes, for about {options.timeout:g} s at most"
    with _show_wait(text):
        if options.here:
            return look_here(window_s=options.window, timeout_s=options.timeout)
        snapshot = look_at_cluster(options.job, window_s=options.window, timeout_s=options.timeout)
    if options.job is not None and not snapshot.jobs:
        raise CommandError(f"There is no running job {options.job!r}.")
    return snapshot


def _why(options: argparse.Namespace, output: Output) -> int:
    before, equal = frozenset[object](), 0
    while True:
        findings = _why_once(options, output)
        status = exit_status(findings)
        if options.watch is None or status == 1:
            return status
        suspects = _list_suspects(findings)
        equal = equal + 1 if suspects == before else 1
        if suspects and equal == MOST_EQUAL:
            return status
        before = suspects
        output.flush()
        time.sleep(options.watch)


def _list_suspects(findings: Iterable[Finding]) -> frozenset[object]:
    """Return who stands still where, by the findings that blame no process; all ranks in one collective are such."""
    there = [one for one in findings if not (one.blames or one.moves)]
    suspects = {(one.name, one.node, one.pid, one.where) for finding in there for one in finding.suspects}
    ranks = {(one.kind, one.fleet, one.ranks, one.ordinals) for one in there if one.kind in ("together", "mismatch")}
    return frozenset(suspects | ranks)


def _why_once(options: argparse.Namespace, output: Output) -> Sequence[Finding]:
    snapshot = _look(options)
    findings = diagnose(snapshot, after_s=AFTER_S if options.after is None else options.after)
    if options.json:
        output.print_json(to_json(snapshot, findings))
    else:
        if options.watch is not None:
            moment = datetime.datetime.fromtimestamp(snapshot.looked_at, datetime.UTC)
            output.print(Text(f"{moment:%Y-%m-%d %H:%M:%S} UTC"))
        output.print(draw_findings(snapshot, findings, verbose=options.verbose))
    if options.report is not None:
        try:
            write_report(snapshot, findings, options.report)
        except OSError as error:
            raise CommandError(f"Cannot write the report: {error}. Name another file with --report.") from error
    return findings


def _ps(options: argparse.Namespace, output: Output) -> int:
    snapshot = _look(options)
    if options.json:
        rows = [row for row, _ in list_processes(snapshot)]
        output.print_json(clean_all({"schema": SCHEMA, "took_s": snapshot.took_s, "processes": rows}))
    else:
        output.print(Group(draw_processes(list_processes(snapshot)), draw_gaps(snapshot)))
    return 0


def _stacks(options: argparse.Namespace, output: Output) -> int:
    classes = fold_stacks(_look(options))
    if options.json:
        output.print_json(clean_all({"schema": SCHEMA, "stacks": [to_fields(one) for one in classes]}))
    else:
        output.print(draw_stacks(classes))
    return 0


def _timeline(options: argparse.Namespace, output: Output) -> int:
    snapshot = _look(options)
    spans = [
        span
        for job in snapshot.jobs
        for span in ask_head(f"list the task events of job {job.job_id}", read_spans, job.job_id)
    ]
    try:
        write_file(make_job_trace(snapshot, spans), options.output)
    except OSError as error:
        raise CommandError(f"Cannot write the trace: {error}. Name another file with -o.") from error
    running = sum(one.ended is None for one in spans)
    text = f"Wrote {options.output}: {len(spans)} calls and tasks, of which {running} run."
    output.print(Text(f"{text} Open it in https://ui.perfetto.dev."))
    return 0
