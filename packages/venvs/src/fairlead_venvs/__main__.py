# SPDX-License-Identifier: Apache-2.0
"""The command line: `python -m fairlead_venvs {build,list,prune}`."""

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence

from ._housekeeping import Venv, list_venvs, prune
from ._local import create_local_venv
from ._lock import venv_root
from ._nodes import CLIENT_REMEDY, abbreviate, create_local_venv_on_each_node
from ._spec import VenvSpec
from .exceptions import VenvError, VenvNodesError

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status."""
    parser = _make_parser()
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    except VenvError as error:
        lines = [error.message, *error.exceptions] if isinstance(error, VenvNodesError) else [error]
        print(*lines, sep="\n", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fairlead_venvs",
        description="Environments for the workers of a Ray cluster, in the folder FAIRLEAD_VENV_DIR.",
    )
    commands = parser.add_subparsers(required=True, metavar="{build,list,prune}")
    build = commands.add_parser("build", help="build an environment if it is missing, and print its interpreter")
    build.add_argument("command", nargs="?", help="such as 'uv run --locked --extra vllm --directory X'")
    build.add_argument("-r", "--requirement", action="append", dest="requirements", metavar="REQUIREMENT")
    build.add_argument("--find-links", action="append", default=[], metavar="FOLDER")
    build.add_argument("--no-index", action="store_true")
    build.add_argument("--name", help="first part of the folder's name")
    build.add_argument("--timeout", type=_seconds, default=1800.0, metavar="TIME", help="90s, 1h (default: 30m)")
    place = build.add_mutually_exclusive_group()
    place.add_argument("--force", action="store_true", help="build it again; on this machine only")
    place.add_argument(
        "--address",
        help="of a Ray cluster, to build on its nodes ('auto': the one in RAY_ADDRESS, or of this machine)",
    )
    build.set_defaults(run=_build)
    listed = commands.add_parser("list", help="list the environments of this machine")
    listed.set_defaults(run=_list)
    pruned = commands.add_parser("prune", help="remove unused environments of this machine")
    pruned.add_argument("--keep", action="append", default=[], metavar="NAME", help="an environment that stays")
    pruned.add_argument("--older-than", type=_seconds, metavar="TIME", help="time since the last use: 90s, 12h, 7d")
    pruned.add_argument("--dry-run", action="store_true", help="remove nothing")
    pruned.set_defaults(run=_prune)
    return parser


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a time such as 90s, 12h or 7d, got {text!r}")
    return float(match[1]) * UNITS[match[2]]


def _attach(address: str) -> None:
    import ray

    named = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    if "://" in named:  # Ray connects to any such address through Ray Client.
        raise VenvError(f"{named!r} is an address of Ray Client, which Fairlead does not support. {CLIENT_REMEDY}")
    try:
        ray.init(address=named, logging_level="warning", log_to_driver=False)
    except ConnectionError as error:
        raise VenvError(f"There is no Ray cluster at {named!r}: {error}") from None


def _build(options: argparse.Namespace) -> None:
    names = ("command", "requirements", "find_links", "no_index")
    spec = VenvSpec(**{name: getattr(options, name) for name in names})
    if options.address:
        _attach(options.address)
        python = create_local_venv_on_each_node(spec, options.name, timeout_s=options.timeout)
    else:
        python = create_local_venv(spec, options.name, options.force, options.timeout)
    print(python)  # noqa: T201


def _list(_: argparse.Namespace) -> None:
    _print_venvs(list_venvs(), f"in {venv_root()}")


def _prune(options: argparse.Namespace) -> None:
    gone = prune(options.keep, options.older_than, dry_run=options.dry_run)
    _print_venvs(gone, f"{'would be removed' if options.dry_run else 'removed'} from {venv_root()}")


def _print_venvs(venvs: Sequence[Venv], what: str) -> None:
    for venv in venvs:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(venv.used_at))
        users = f"in use by {abbreviate(map(str, venv.pids))}" if venv.pids else f"last used {used}"
        facts = (f"Python {venv.version}", f"Ray {venv.ray}" if venv.ray else "no Ray", users, venv.description)
        print(venv.path.name, *facts, sep="  ")  # noqa: T201
    print(len(venvs), what)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
