# SPDX-License-Identifier: Apache-2.0
"""The common parts of the command lines: attaching to a cluster, output, and exit statuses."""

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.job_config import JobConfig
from rich.console import Console, RenderableType

from ._init import attach_to
from ._nodes.head import head_deadline, head_is_silent
from .exceptions import PlacementError

# The width of output that is not a terminal, wide enough that few lines are broken.
WIDTH = 160
# In the metadata of the job that a command is for Ray, so that another command leaves it out.
COMMAND_MARK: str = "fairlead_command"


def add_command(commands: Any, name: str, what: str, *, epilog: str) -> argparse.ArgumentParser:
    """Add a command that attaches to a cluster to the result of `add_subparsers`, and return its parser.

    Args:
        commands: the commands.
        name: the name of the command.
        what: what it does, as a phrase that begins with a verb.
        epilog: the end of its help, with the exit statuses.
    """
    shape = argparse.RawDescriptionHelpFormatter
    about = f"{what[0].upper()}{what[1:]}."
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=what, description=about, epilog=epilog, formatter_class=shape
    )
    default = "default: RAY_ADDRESS, or the announced or only one here"
    parser.add_argument("--address", default="auto", help=f"address of the cluster; {default}")
    return parser


def run_command(command: Callable[[], int], *errors: type[Exception]) -> int:
    """Run the body of a command line, and return its exit status.

    That is the result of the body; 3 after an error about the cluster or one of `errors`, which is printed without a
    traceback; 130 after Ctrl-C; 141 if the reader of the output has closed the pipe.
    """
    try:
        status = command()
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        # Python writes what is left in its buffer when it ends, and must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except (PlacementError, ray.exceptions.RayError, *errors) as error:
        print(error, file=sys.stderr)  # noqa: T201  this is a program
        status = 3
    if head_is_silent():  # for which Ray would wait at the exit of the interpreter
        sys.stderr.flush()
        os._exit(status)
    return status


@contextlib.contextmanager
def attach(address: str, *, timeout_s: float | None = None) -> Iterator[None]:
    """Attach to a running cluster for the length of a block, with one `head_deadline`, and never start one.

    Args:
        address: as for `init_ray`.
        timeout_s: how long Ray's head may take to answer; None for 15 s.

    Raises:
        PlacementError: there is no cluster, it wants another token, or it runs another version of Ray or Python.
        SystemExit: the address is not one.
    """
    job = JobConfig(metadata={COMMAND_MARK: "yes"})
    logging.getLogger("ray").setLevel(logging.ERROR)  # as `ray.init` does below, but before Ray finds a token
    try:
        if address == "local":
            raise ValueError("--address local would start a cluster of its own; leave it out, or name a running one")
        attach_to(
            address, timeout_s=timeout_s, find_token=True, job_config=job, log_to_driver=False, logging_level="error"
        )
    except ValueError as error:
        print(error, file=sys.stderr)  # noqa: T201
        raise SystemExit(2) from None
    except RuntimeError as error:
        raise PlacementError(f"Cannot attach to the cluster at {address}: {error}") from error
    try:
        # Ray prints to standard output when a node dies.
        with contextlib.redirect_stdout(sys.stderr), head_deadline():
            yield
    finally:
        if not head_is_silent():
            ray.shutdown()


class Output:
    """Prints the result of a command on the standard output of the time when this object is made."""

    def __init__(self) -> None:
        self._file = sys.stdout

    def print(self, renderable: RenderableType) -> None:
        """Print tables and text, with colours on a terminal, else with long lines."""
        console = Console(file=self._file, width=None if self._file.isatty() else WIDTH)
        with console.capture() as captured:
            console.print(renderable)
        # rich would end the program itself if the pipe is closed.
        lines = [f"{line.rstrip()}\n" for line in captured.get().splitlines()]
        print(*lines, sep="", end="", file=self._file, flush=True)

    def print_json(self, value: Any) -> None:
        """Print a value as JSON."""
        print(json.dumps(value, indent=2), file=self._file, flush=True)
