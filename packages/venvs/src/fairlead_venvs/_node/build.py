# SPDX-License-Identifier: Apache-2.0
"""One environment on this machine: find it, or build it aside, verify it, and rename it into place."""

import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..exceptions import VenvBuildError, VenvError, VenvMismatchError
from .store import HOLD, build_folder, check_root, mark_used, publish, read_manifest, write_facts
from .uv import Deadline, Runner, redact

PYLOCK = "pylock.toml"
PROBE = """\
import importlib.metadata as metadata, json, platform
try:
    ray = metadata.version("ray")
except metadata.PackageNotFoundError:
    ray = None
print(json.dumps([platform.python_version(), ray]))
"""
# Variables of uv that have had their effect, and that it refuses beside a lock.
OF_THE_RESOLUTION = ("UV_CONSTRAINT", "UV_EXCLUDE", "UV_OVERRIDE")


@dataclass(frozen=True)
class Recipe:
    """How to build one environment from its files, the lock among them: plain data that the driver sends to a node."""

    fingerprint: str
    folder: str  # of the environment, on every machine
    shared: bool  # whether the group may change the folder
    platform: str
    python: str
    system_site_packages: bool
    no_index: bool
    env: Mapping[str, str]
    setup: tuple[str, ...]
    description: str  # for people, without credentials


class Outcome(NamedTuple):
    """An environment that is ready."""

    python: str
    version: str
    ray: str | None


def this_platform() -> str:
    """Return the platform that binaries have to fit, such as "linux-x86_64-glibc"."""
    libc = "glibc" if "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", ()) else "other"
    return f"{sys.platform}-{platform.machine()}-{libc}"


def this_python(parts: int = 2) -> str:
    """Return the first parts of the version of this Python, by default major and minor, such as "3.11"."""
    return ".".join(map(str, sys.version_info[:parts]))


def find_venv(recipe: Recipe) -> Outcome | None:
    """Return an environment if it is complete, else None. Takes no lock and starts no process."""
    if recipe.platform != this_platform():
        raise VenvMismatchError("platform", this_platform(), recipe.platform, "This machine")
    check_root(Path(recipe.folder).parent, shared=recipe.shared)
    manifest = read_manifest(recipe.folder, recipe.fingerprint)
    if manifest is None:
        return None
    mark_used(recipe.folder)
    return Outcome(f"{recipe.folder}/bin/python", manifest["version"], manifest["ray"])


def ensure_venv(
    recipe: Recipe, read_files: Callable[[], Mapping[str, bytes]], deadline: Deadline, *, force: bool = False
) -> Outcome:
    """Return the environment of a recipe, and build it if it is missing, or with `force`."""
    if not force and (ready := find_venv(recipe)) is not None:
        return ready
    place = Path(recipe.folder)

    def is_done() -> bool:
        return not force and read_manifest(place, recipe.fingerprint) is not None

    with build_folder(place, is_done, deadline, shared=recipe.shared) as aside:
        if aside is not None:
            _build(recipe, aside, read_files(), deadline)
            publish(aside / "env", place, is_done)
    if (ready := find_venv(recipe)) is None:
        raise VenvBuildError(f"{place} was removed immediately after it was built. Try again.")
    return ready


def _build(recipe: Recipe, aside: Path, files: Mapping[str, bytes], deadline: Deadline) -> None:
    """Build a complete environment in `aside / "env"`."""
    began = time.time()
    env, stage = aside / "env", aside / "stage"
    for name, content in files.items():
        path = stage / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    variables = {**recipe.env, **dict.fromkeys(OF_THE_RESOLUTION, "")}
    if "UV_FIND_LINKS" in recipe.env:  # uv refuses a folder that this machine lacks
        links = recipe.env["UV_FIND_LINKS"].split(",")
        variables["UV_FIND_LINKS"] = ",".join(link for link in links if "://" in link or os.path.isdir(link))
    runner, python = Runner(deadline, variables, no_index=recipe.no_index), f"{env}/bin/python"
    # This interpreter if it fits, as uv need not search for it.
    base = sys.executable if recipe.python in (this_python(), this_python(3)) else recipe.python
    more = ["--system-site-packages"] if recipe.system_site_packages else []
    runner.uv(
        *("venv", "--relocatable", "--no-project", "--python", base, *more, str(env)),
        cwd=stage,
        failed=f"uv could not create an environment with Python {recipe.python}",
    )
    runner.uv(
        *("pip", "sync", "--python", python, PYLOCK),
        cwd=stage,
        failed="uv could not install the packages. A source distribution, as that of a project, also needs its build "
        "backend from the index or from uv's cache on this machine",
    )
    if recipe.setup:
        search = os.pathsep.join([os.path.dirname(python), runner.env.get("PATH", os.defpath)])
        program = shutil.which(recipe.setup[0], path=search) or recipe.setup[0]
        own = {"PATH": search, "VIRTUAL_ENV": str(env)}
        runner.run([program, *recipe.setup[1:]], cwd=env, env=own, failed="The setup command failed")
    version, ray = probe(python, runner)
    if not f"{version}.".startswith(f"{recipe.python}."):
        raise VenvBuildError(f"Python {recipe.python} was requested, and the new environment has {version}.")
    (env / ".lock").unlink(missing_ok=True)  # uv's own, which everybody may write to
    for packages in env.glob("lib/python*/site-packages"):
        (packages / "_fairlead_hold.py").write_text(HOLD, encoding="utf-8")
        (packages / "fairlead_hold.pth").write_text("import _fairlead_hold\n", encoding="utf-8")
    facts = {"fingerprint": recipe.fingerprint, "description": recipe.description, "built_at": began}
    write_facts(env, {**facts, "version": version, "ray": ray})


def probe(python: str, runner: Runner) -> tuple[str, str | None]:
    """Run an interpreter, and return its version, and that of its Ray or None."""
    # Isolated: neither variables nor the current folder decide where modules come from.
    output = runner.run([python, "-I", "-c", PROBE], cwd=Path("/"), failed=f"{python} does not run")
    try:
        # The last line, as code that the interpreter runs when it starts may print, too.
        version, ray = json.loads(output.splitlines()[-1])
    except (IndexError, TypeError, ValueError):
        raise VenvBuildError(f"{python} does not report its version", output=tuple(output.splitlines())) from None
    return version, ray


# The answer of a node is plain data: the name of a class and its arguments. The class is Outcome or that of an error;
# the name is empty if there is no environment.
Answer = tuple[str, tuple[Any, ...]]


def _answer(function: Callable[..., Outcome | None]) -> Callable[..., Answer]:
    """Turn what a function returns or raises into plain data."""

    def run(*arguments: Any) -> Answer:
        try:
            ready = function(*arguments)
        except Exception as error:  # noqa: BLE001 - the driver reports whatever goes wrong on a node
            known = (
                error if isinstance(error, VenvError) else VenvBuildError(redact(f"{type(error).__name__}: {error}"))
            )
            return type(known).__name__, known.__reduce__()[1]
        return ("", ()) if ready is None else ("Outcome", tuple(ready))

    return run


@_answer
def ensure_here(recipe: Mapping[str, Any], files: Mapping[str, bytes] | None, timeout_s: float) -> Outcome | None:
    """Return the environment of this node. If it is missing, build it from the files; without them, return None."""
    wanted = Recipe(**recipe)
    if files is None:
        return find_venv(wanted)
    return ensure_venv(wanted, lambda: files, Deadline(timeout_s))


@_answer
def probe_here(python: str, timeout_s: float) -> Outcome:
    """Return the versions of Python and Ray of an interpreter of this node."""
    return Outcome(python, *probe(python, Runner(Deadline(timeout_s), {})))
