# SPDX-License-Identifier: Apache-2.0
"""Arguments of the command line, which are checked before anything takes time."""

import argparse
import os
from pathlib import Path


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
