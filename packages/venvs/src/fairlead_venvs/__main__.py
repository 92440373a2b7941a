# SPDX-License-Identifier: Apache-2.0
"""The command line: `python -m fairlead_venvs {build,list,prune}`."""

import argparse
import logging
import time
from collections.abc import Sequence

from ._housekeeping import Venv, list_venvs, prune
from ._lock import VenvSpec, venv_root
from ._nodes import abbreviate, create_local_venv
from .exceptions import VenvError


def main() -> None:
    """Run the command that was typed. It exits with 1 for a failure, and with 2 for misuse."""
    parser = argparse.ArgumentParser(
        prog="python -m fairlead_venvs",
        description="Environments for the workers of a Ray cluster, in the folder FAIRLEAD_VENV_DIR.",
    )
    commands = parser.add_subparsers(required=True, metavar="{build,list,prune}")
    build = commands.add_parser("build", help="build an environment if it is missing, and print its interpreter")
    build.add_argument("command", nargs="?", help="such as 'uv run --locked --extra vllm --directory X'")
    build.add_argument("-r", "--requirement", action="append", dest="requirements", metavar="REQUIREMENT")
    build.add_argument("--name", help="first part of the folder's name")
    build.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="(default: 1800)")
    build.add_argument("--force", action="store_true", help="build it again")
    build.set_defaults(run=_build)
    listed = commands.add_parser("list", help="list the environments of this machine")
    listed.set_defaults(run=lambda _: _print_venvs(list_venvs(), "in"))
    pruned = commands.add_parser("prune", help="remove unused environments of this machine")
    pruned.add_argument("--keep", action="append", default=[], metavar="NAME", help="an environment that stays")
    pruned.add_argument("--older-than", type=float, metavar="DAYS", help="days since the last use (default: 5 minutes)")
    pruned.set_defaults(run=_prune)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        options.run(options)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    except (OSError, VenvError) as error:
        parser.exit(1, f"{error}\n")


def _build(options: argparse.Namespace) -> None:
    spec = VenvSpec(command=options.command, requirements=options.requirements)
    print(create_local_venv(spec, options.name, options.force, options.timeout))  # noqa: T201


def _prune(options: argparse.Namespace) -> None:
    older_than = None if options.older_than is None else options.older_than * 86_400
    _print_venvs(prune(options.keep, older_than), "removed from")


def _print_venvs(venvs: Sequence[Venv], what: str) -> None:
    for venv in venvs:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(venv.used_at))
        users = f"in use by {abbreviate(map(str, venv.pids))}" if venv.pids else f"last used {used}"
        facts = (f"Python {venv.version}", f"Ray {venv.ray}" if venv.ray else "no Ray", users, venv.description)
        print(venv.path.name, *facts, sep="  ")  # noqa: T201
    print(len(venvs), what, venv_root())  # noqa: T201


if __name__ == "__main__":
    main()
