# SPDX-License-Identifier: Apache-2.0
"""The command line: `python -m fairlead_venvs {build,list,prune,prefetch}`."""

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ._build.store import venv_root
from ._build.uv import Deadline
from ._cluster.ensure import create_local_venv_on_each_node, ensure_on_nodes
from ._cluster.rpc import CLIENT_REMEDY, Nodes, abbreviate, alive_nodes
from ._housekeeping import Venv, list_venvs, prune
from ._local import create_local_venv, ensure_here
from ._planning.spec import is_uv_command
from ._ray_private import announced_address
from ._registry import get_actor_python_env, known_actor_environments
from ._spec import VenvSpec, as_spec
from .exceptions import VenvError, VenvNodesError

STYLES = {"built": "green", "reused": "", "skipped": "dim", "failed": "red"}
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
# The width of output that is not a terminal, wide enough that no line is broken.
WIDTH = 200


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    except VenvError as error:
        lines = [error.message, *error.exceptions] if isinstance(error, VenvNodesError) else [error]
        print(*lines, sep="\n", file=sys.stderr)  # noqa: T201
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fairlead_venvs",
        description="Environments for the workers of a Ray cluster, in the folder FAIRLEAD_VENV_DIR.",
    )
    commands = parser.add_subparsers(required=True, metavar="{build,list,prune,prefetch}")
    build = commands.add_parser("build", help="build an environment if it is missing, and print its interpreter")
    build.add_argument("command", nargs="?", help="such as 'uv run --locked --extra vllm --directory X'")
    build.add_argument("-r", "--requirement", action="append", dest="requirements", metavar="REQUIREMENT")
    build.add_argument("--project", metavar="FOLDER")
    build.add_argument("--extra", action="append", default=[], dest="extras")
    build.add_argument("--group", action="append", default=[], dest="groups")
    build.add_argument("--python", metavar="VERSION")
    build.add_argument("--find-links", action="append", default=[], metavar="FOLDER")
    build.add_argument("--no-index", action="store_true")
    build.add_argument("--name", help="first part of the folder's name")
    _add_common(build).add_argument("--force", action="store_true", help="build it again; on this machine only")
    build.set_defaults(run=_build)
    shown = commands.add_parser("list", help="list the environments of this machine")
    shown.set_defaults(run=_list)
    pruned = commands.add_parser("prune", help="remove unused environments of this machine")
    pruned.add_argument("--keep", action="append", default=[], metavar="NAME", help="an environment that stays")
    pruned.add_argument("--older-than", type=_seconds, metavar="TIME", help="time since the last use: 90s, 12h, 7d")
    pruned.add_argument("--dry-run", action="store_true", help="remove nothing")
    pruned.set_defaults(run=_prune)
    fetched = commands.add_parser("prefetch", help="make the environments of worker classes ready")
    fetched.add_argument("classes", nargs="*", metavar="CLASS", help="by default all classes of the pyproject.toml")
    _add_common(fetched)
    fetched.set_defaults(run=_prefetch)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Add the common options of commands that build, and return the group of options that exclude `--address`."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--address",
        help="of a Ray cluster, to do it on its nodes ('auto': the one in RAY_ADDRESS, or announced by `ray start`)",
    )
    parser.add_argument("--timeout", type=_seconds, default=1800.0, metavar="TIME", help="90s, 1h (default: 30m)")
    return where


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a time such as 90s, 12h or 7d, got {text!r}")
    return float(match[1]) * UNITS[match[2]]


def _attach(address: str) -> None:
    import ray

    named = (os.environ.get("RAY_ADDRESS") or "auto") if address == "auto" else address
    if named == "auto" and not announced_address():
        raise VenvError(
            "No Ray cluster was named or announced. Pass the address of one, set RAY_ADDRESS, or start a cluster with "
            "`ray start --head`."
        )
    if "://" in named:  # Ray connects to any such address through Ray Client.
        raise VenvError(f"{named!r} is an address of Ray Client, which Fairlead does not support. {CLIENT_REMEDY}")
    # Without an address, Ray takes the announced one; for "auto" it may take any that runs on this machine.
    ray.init(address=None if named == "auto" else named, logging_level="warning", log_to_driver=False)


def _build(options: argparse.Namespace) -> int:
    given = ("command", "requirements", "project", "extras", "groups", "python", "find_links", "no_index")
    spec = VenvSpec(**{name: getattr(options, name) for name in given})
    if options.address:
        _attach(options.address)
        python = create_local_venv_on_each_node(spec, options.name, timeout_s=options.timeout)
    else:
        python = create_local_venv(spec, options.name, options.force, options.timeout)
    print(python)  # noqa: T201
    return 0


def _list(options: argparse.Namespace) -> int:
    venvs = list_venvs()
    _print_venvs(venvs, f"{len(venvs)} in {venv_root()}")
    return 0


def _prune(options: argparse.Namespace) -> int:
    gone = prune(options.keep, options.older_than, dry_run=options.dry_run)
    would = "would be removed" if options.dry_run else "removed"
    _print_venvs(gone, f"{len(gone)} {would} from {venv_root()}")
    return 0


def _prefetch(options: argparse.Namespace) -> int:
    if options.address:
        _attach(options.address)
    nodes, deadline = alive_nodes() if options.address else None, Deadline(options.timeout)
    table = Table("class", "", "interpreter, or error")
    counts = dict.fromkeys(STYLES, 0)
    for fqn in dict.fromkeys(options.classes) or known_actor_environments():
        status, detail = fetch(fqn, nodes, deadline)
        table.add_row(Text(fqn), Text(status, STYLES[status]), Text(detail))
        counts[status] += 1
    console = _console()
    console.print(table)
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return 1 if counts["failed"] else 0


def fetch(fqn: str, nodes: Nodes | None, deadline: Deadline) -> tuple[str, str]:
    """Make the environment of a worker class ready, on nodes or here; return the result, and an interpreter or why."""
    try:
        what = get_actor_python_env(fqn)
        if isinstance(what, str) and not is_uv_command(what):
            return "skipped", what
        if nodes is None:
            ready = [ensure_here(as_spec(what), None, deadline)]
        else:
            (outcomes,) = ensure_on_nodes([as_spec(what)], None, nodes, deadline, progress=True)
            ready = list(outcomes.values())
    except VenvNodesError as error:
        return "failed", "\n".join(map(str, error.exceptions))
    except (ValueError, TypeError, VenvError) as error:
        return "failed", str(error)
    return "built" if any(one.built for one in ready) else "reused", ready[0].python


def _print_venvs(venvs: Sequence[Venv], headline: str) -> None:
    console = _console()
    if venvs:
        table = Table("name", "python", "ray", "size", "last used", "in use by", "content")
        for venv in venvs:
            size = "" if venv.size_bytes is None else f"{venv.size_bytes / 2**20:,.1f} MiB"
            users = abbreviate(map(str, venv.pids)) or "-"
            facts = (venv.version, venv.ray or "-", size, _ago(venv.used_at), users, venv.description or "-")
            table.add_row(*map(Text, (venv.path.name, *facts)))
        console.print(table)
    console.print(Text(headline))


def _ago(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


if __name__ == "__main__":
    sys.exit(main())
