# SPDX-License-Identifier: Apache-2.0
"""What runs on a node, as a Ray task. It and what it imports from here travel by value, answers are plain data."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from ..exceptions import VenvError, VenvMismatchError
from .build import ensure, found
from .in_use import users_of
from .install import PROBE
from .recipe import Outcome, Recipe, this_platform
from .redact import redacted
from .store import mark_used, python_of
from .uv import Deadline

__all__ = ["build_here", "look_here", "probe_here", "renew_here"]

# ("ready", python, built, version, ray, shared), ("absent",), or ("failed", name of the exception's class, arguments)
Answer = tuple[Any, ...]


def look_here(folder: str, fingerprint: str, platform: str) -> Answer:
    """Whether this node has the environment."""
    if platform != this_platform():
        return _failed(VenvMismatchError("platform", this_platform(), platform, "It"))
    ready = found(folder, fingerprint)
    return ("absent",) if ready is None else _ready(ready)


def build_here(recipe: Mapping[str, Any], files: Sequence[Any], timeout_s: float) -> Answer:
    """Build it here, unless it is there by now.

    Args:
        recipe: its fields.
        files: nothing, or a reference of Ray's to names and contents: in a list, so that they are not fetched
            to where they are not needed.
        timeout_s: what is left of the time.
    """

    def fetched() -> list[tuple[str, bytes]]:
        import ray

        return list(ray.get(files[0])) if files else []

    wanted = Recipe(**recipe)
    try:
        return _ready(ensure(wanted, fetched, deadline=Deadline(timeout_s)))
    except VenvError as error:
        return _failed(error)
    except Exception as error:  # noqa: BLE001 - a node's trouble is told, whatever it is
        return (
            "failed",
            "VenvBuildError",
            (redacted(f"{type(error).__name__}: {error}", wanted.secrets), "", (), None),
        )


def probe_here(python: str, timeout_s: float) -> Answer:
    """What an interpreter of this node says of itself."""
    command = [python, "-I", "-c", PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
        # The last line: what the interpreter runs on its own at start may print as well.
        version, _, _, ray = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return ("failed", "VenvTimeoutError", (f"asking {python} for its version", timeout_s, None))
    except OSError as error:
        return ("failed", "VenvBuildError", (f"{python} does not run: {error}", "", (), None))
    except (IndexError, TypeError, ValueError):
        reason = f"{python} exits with {done.returncode} and does not tell its version"
        return ("failed", "VenvBuildError", (reason, "", tuple(done.stderr.splitlines()[-50:]), None))
    return ("ready", python, False, version, ray)


def renew_here(folder: str) -> Answer:
    """Mark an environment as used by this host if a process runs from it."""
    if not any(users_of([folder]).values()):
        return ("absent",)
    mark_used(folder)
    return ("ready", python_of(folder), False, "", None)


def _ready(outcome: Outcome) -> Answer:
    return ("ready", outcome.python, outcome.built, outcome.version, outcome.ray, outcome.shared)


def _failed(error: VenvError) -> Answer:
    return ("failed", type(error).__name__, error.args)
