# SPDX-License-Identifier: Apache-2.0
"""The functions that run on a node as Ray tasks. They are sent by value, and their answers are plain data."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..exceptions import VenvBuildError, VenvError, VenvMismatchError
from .build import ensure_venv, find_venv, probe
from .recipe import File, Recipe, this_platform
from .redact import redact
from .users import read_variables
from .uv import Deadline, Runner, Session

# ("ready", python, built, version, ray), ("absent",), or ("failed", name of the exception's class, arguments)
Answer = tuple[Any, ...]


def look_here(folder: str, fingerprint: str, platform: str) -> Answer:
    """Answer whether this node has an environment."""
    if platform != this_platform():
        return _report(VenvMismatchError("platform", this_platform(), platform, "It"))
    ready = find_venv(folder, fingerprint)
    return ("absent",) if ready is None else ("ready", *ready)


def build_here(recipe: Mapping[str, Any], files: Sequence[Any], timeout_s: float) -> Answer:
    """Build an environment on this node, unless it is there by now."""

    def fetch() -> list[File]:
        import ray

        # A reference to the files, in a list: Ray does not fetch it before it is needed.
        return list(ray.get(files[0])) if files else []

    wanted = Recipe(**recipe)
    try:
        return ("ready", *ensure_venv(wanted, fetch, Session(Deadline(timeout_s), variables=read_variables())))
    except VenvError as error:
        return _report(error)
    except Exception as error:  # noqa: BLE001 - the driver reports whatever goes wrong on a node
        return _report(VenvBuildError(redact(f"{type(error).__name__}: {error}", wanted.secrets)))


def probe_here(python: str, timeout_s: float) -> Answer:
    """Ask an interpreter of this node for its versions of Python and Ray."""
    try:
        version, _, _, ray = probe(python, Runner(Session(Deadline(timeout_s))))
    except VenvError as error:
        return _report(error)
    return ("ready", python, False, version, ray)


def _report(error: VenvError) -> Answer:
    return ("failed", type(error).__name__, error.args)
