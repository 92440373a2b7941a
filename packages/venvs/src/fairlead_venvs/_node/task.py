# SPDX-License-Identifier: Apache-2.0
"""The functions that run on a node as Ray tasks. They are sent by value, and their answers are plain data."""

from collections.abc import Mapping
from typing import Any

from ..exceptions import VenvBuildError, VenvError
from .build import Files, Recipe, check_platform, ensure_venv, find_venv, probe
from .redact import redact
from .uv import Deadline, Runner, Session

# ("ready", python, built, version, ray), ("absent",), or ("failed", name of the exception's class, arguments)
Answer = tuple[Any, ...]


def look_here(recipe: Mapping[str, Any]) -> Answer:
    """Answer whether this node has an environment."""
    try:
        check_platform(Recipe(**recipe))
        ready = find_venv(Recipe(**recipe))
    except VenvError as error:
        return _report(error)
    return ("absent",) if ready is None else ("ready", *ready)


def build_here(recipe: Mapping[str, Any], files: Mapping[str, Any], timeout_s: float) -> Answer:
    """Build an environment on this node, unless it is there by now."""

    def fetch() -> Files:
        import ray

        # Ray does not fetch references inside a mapping before they are needed.
        return zip(files, ray.get(list(files.values())), strict=True)

    wanted = Recipe(**recipe)
    try:
        return ("ready", *ensure_venv(wanted, fetch, Session(Deadline(timeout_s))))
    except VenvError as error:
        return _report(error)
    except Exception as error:  # noqa: BLE001 - the driver reports whatever goes wrong on a node
        return _report(VenvBuildError(redact(f"{type(error).__name__}: {error}", wanted.secrets)))


def probe_here(python: str, timeout_s: float) -> Answer:
    """Ask an interpreter of this node for its versions of Python and Ray."""
    try:
        version, _, _, ray = probe(python, Runner(Session(Deadline(timeout_s)), env={}))
    except VenvError as error:
        return _report(error)
    return ("ready", python, False, version, ray)


def _report(error: VenvError) -> Answer:
    return ("failed", type(error).__name__, error.args)
