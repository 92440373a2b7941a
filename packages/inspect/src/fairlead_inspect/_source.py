# SPDX-License-Identifier: Apache-2.0
"""The interface of sources, which know more of some actors of a job than the kernel and Ray do."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import RenderableType


@dataclass(frozen=True)
class Report:
    """The verdict of a source about its actors: whether something is wrong, as JSON, and for people."""

    wrong: bool
    fields: Mapping[str, Any]
    picture: RenderableType


class Source(Protocol):
    """Judges actors that it knows itself, such as those of Fairlead's groups."""

    def find_actors(self) -> frozenset[str]:
        """Return the ids of the actors that this source judges. The rules for other actors do not blame them."""

    def report(self, options: argparse.Namespace) -> Report:
        """Return what is wrong with them; the options are those of `why`."""

    def add_commands(
        self,
        commands: Any,
        *,
        why: argparse.ArgumentParser,
        stacks: argparse.ArgumentParser,
        epilog: str,
    ) -> None:
        """Add commands and options of its own to the command line."""


def new_file(text: str) -> Path:
    """Return an argument as the path of a file that can be written, which is checked before anything takes time."""
    path = Path(text)
    is_there = os.path.lexists(path)
    try:
        path.open("a").close()
        if not is_there:
            path.unlink()
    except OSError as error:
        folder = path.absolute().parent
        remedy = "name a file in it" if path.is_dir() else "name a folder that you may write to"
        remedy = remedy if folder.is_dir() else f"create the folder {str(folder)!r}, or name one that is there"
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {error.strerror}; {remedy}") from None
    return path


def seconds(text: str) -> float:
    """Return an argument as a number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}")
    return value
