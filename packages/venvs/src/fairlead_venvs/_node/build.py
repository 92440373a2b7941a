# SPDX-License-Identifier: Apache-2.0
"""One environment on this machine: find it, or build it aside, verify it, and rename it into place."""

import contextlib
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..exceptions import VenvBuildError, VenvError, VenvMismatchError
from .redact import redact
from .store import build_folder, check_root, complete, mark_used, prepare_root, publish, python_of, read_manifest
from .uv import Deadline, Runner

PYLOCK = "pylock.toml"
PROBE = """\
import importlib.metadata as metadata, json, platform, sys
try:
    ray = metadata.version("ray")
except metadata.PackageNotFoundError:
    ray = None
print(json.dumps([platform.python_version(), sys.implementation.name, sys.prefix, ray]))
"""
# Variables of uv that have had their effect, and that it refuses beside a lock.
OF_THE_RESOLUTION = ("UV_CONSTRAINT", "UV_EXCLUDE", "UV_OVERRIDE")
# Files by relative path: below the folder in which uv runs.
Files = Iterable[tuple[str, bytes]]


@dataclass(frozen=True)
class Recipe:
    """How to build one environment: plain data that the driver sends to a node."""

    fingerprint: str
    folder: str  # of the environment, on every machine
    shared: bool  # whether the group may change the folder
    platform: str
    python: str
    implementation: str
    system_site_packages: bool
    pylock: str  # the packages to install, by URL and hash
    own: tuple[str, ...]  # source distributions among the files, to be installed last
    links: tuple[str, ...]  # folders and URLs with distributions, for what builds those need
    no_index: bool
    env: Mapping[str, str]
    setup: tuple[str, ...]
    description: str  # for people, without credentials
    secrets: frozenset[str]


class Outcome(NamedTuple):
    """An environment that is ready."""

    python: str
    built: bool
    version: str
    ray: str | None


def this_platform() -> str:
    """Return the platform that binaries have to fit, such as "linux-x86_64-glibc"."""
    libc = "glibc" if "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", ()) else "other"
    return f"{sys.platform}-{platform.machine()}-{libc}"


def this_python(parts: int = 2) -> str:
    """Return the first parts of the version of this Python, by default major and minor, such as "3.11"."""
    return ".".join(map(str, sys.version_info[:parts]))


def find_venv(folder: str, fingerprint: str, shared: bool) -> Outcome | None:
    """Return an environment if it is complete, else None. Takes no lock and starts no process."""
    check_root(Path(folder).parent, shared=shared)
    manifest = read_manifest(folder, fingerprint)
    if manifest is None:
        return None
    mark_used(Path(folder))
    return Outcome(python_of(folder), False, manifest["python"], manifest["ray"])


def check_platform(platform: str) -> None:
    """Refuse a platform whose binaries do not fit this machine."""
    if platform != this_platform():
        raise VenvMismatchError("platform", this_platform(), platform, "This machine")


def ensure_venv(recipe: Recipe, fetch: Callable[[], Files], deadline: Deadline, *, force: bool = False) -> Outcome:
    """Return the environment of a recipe, and build it if it is missing, or with `force`."""
    check_platform(recipe.platform)
    place = Path(recipe.folder)

    def is_done() -> bool:
        return not force and read_manifest(place, recipe.fingerprint) is not None

    built = False
    with explain_errors(place.parent):
        prepare_root(place.parent, shared=recipe.shared)
        with build_folder(place, is_done, deadline) as aside:
            if aside is not None:
                _build(recipe, aside, fetch, deadline)
                publish(aside / "env", place, is_done)
                built = True
    if (ready := find_venv(recipe.folder, recipe.fingerprint, recipe.shared)) is None:
        raise VenvBuildError(f"{place} was removed immediately after it was built. Try again.")
    return ready._replace(built=built)


@contextlib.contextmanager
def explain_errors(root: Path) -> Iterator[None]:
    """Turn an OSError into a VenvBuildError that says which folders have to be writable."""
    try:
        yield
    except VenvError:  # VenvTimeoutError is an OSError, too
        raise
    except OSError as error:
        raise VenvBuildError(
            f"{error}. The folder of all environments, {root} (FAIRLEAD_VENV_DIR), and the one for temporary files "
            "(TMPDIR) must be writable and have room."
        ) from None


def _build(recipe: Recipe, aside: Path, fetch: Callable[[], Files], deadline: Deadline) -> None:
    """Build a complete environment in `aside / "env"`."""
    began = time.time()
    env, stage = aside / "env", aside / "stage"
    lay_out([(PYLOCK, recipe.pylock.encode()), *fetch()], stage)
    links = [link for link in recipe.links if "://" in link or os.path.isdir(link)]
    # A variable and not an argument, as everybody on the machine can see arguments.
    links_of_all = {"UV_FIND_LINKS": ",".join(links)} if links else {}
    variables = {**recipe.env, **links_of_all, **dict.fromkeys(OF_THE_RESOLUTION, "")}
    runner = Runner(deadline, env=variables, secrets=recipe.secrets, no_index=recipe.no_index)
    _install(recipe, env, stage, runner)
    version, ray = _verify(env, recipe, runner)
    facts = {
        "built_at": began,
        "description": redact(recipe.description, recipe.secrets),
        "fingerprint": recipe.fingerprint,
        "python": version,
        "ray": ray,
        "seconds": round(time.time() - began, 3),
    }
    (env / ".lock").unlink(missing_ok=True)  # uv's own, which everybody may write to
    complete(env, facts)


def lay_out(files: Files, stage: Path) -> None:
    """Write files below a folder that only this user can enter: a URL among them may have credentials."""
    stage.mkdir(mode=0o700, exist_ok=True)
    for name, content in files:
        path = stage / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def choose_interpreter(python: str, implementation: str) -> str:
    """Return an interpreter for uv: this one if it fits, as uv need not search for it; else the version."""
    if implementation == sys.implementation.name and python in (this_python(), this_python(3)):
        return sys.executable
    return f"{implementation}@{python}"


def _install(recipe: Recipe, env: Path, stage: Path, runner: Runner) -> None:
    """Create the environment, install everything into it, and run the setup command."""
    runner.uv(
        *("venv", "--relocatable", "--no-project"),
        *("--python", choose_interpreter(recipe.python, recipe.implementation)),
        *(["--system-site-packages"] if recipe.system_site_packages else []),
        str(env),
        cwd=stage,
        failed=f"uv could not create an environment with Python {recipe.python}",
    )
    python = python_of(env)
    if "[[packages]]" in recipe.pylock:
        arguments = ("pip", "sync", "--python", python, PYLOCK)
        runner.uv(*arguments, cwd=stage, failed="uv could not install the packages")
    if recipe.own:
        runner.uv(
            *("pip", "install", "--python", python, "--no-deps", *(f"./{name}" for name in recipe.own)),
            cwd=stage,
            failed="uv could not build and install the project's own code, which needs its build backend from the "
            "index or from uv's cache on this machine",
        )
    if recipe.setup:
        path = os.pathsep.join([os.path.dirname(python), runner.env.get("PATH", os.defpath)])
        program = shutil.which(recipe.setup[0], path=path) or recipe.setup[0]
        variables = {"PATH": path, "VIRTUAL_ENV": str(env)}
        runner.run([program, *recipe.setup[1:]], cwd=env, env=variables, failed="The setup command failed")


def probe(python: str, runner: Runner) -> tuple[str, str, str, str | None]:
    """Run an interpreter, and return its version, implementation and prefix, and the version of its Ray or None."""
    # Isolated: neither variables nor the current folder decide where modules come from.
    output = runner.run([python, "-I", "-c", PROBE], cwd=Path("/"), failed=f"{python} does not run")
    try:
        # The last line, as code that the interpreter runs when it starts may print, too.
        version, implementation, prefix, ray = json.loads(output.splitlines()[-1])
    except (IndexError, TypeError, ValueError):
        raise VenvBuildError(f"{python} does not report its version", output=tuple(output.splitlines())) from None
    return version, implementation, prefix, ray


def _verify(env: Path, recipe: Recipe, runner: Runner) -> tuple[str, str | None]:
    """Check the Python of a new environment; return its version, and that of its Ray or None."""
    version, implementation, prefix, ray = probe(python_of(env), runner)
    same = implementation == recipe.implementation and f"{version}.".startswith(f"{recipe.python}.")
    if not same or os.path.realpath(prefix) != os.path.realpath(env):
        raise VenvBuildError(
            f"{recipe.implementation} {recipe.python} was requested, and the new environment reports {implementation} "
            f"{version} in {prefix}."
        )
    return version, ray


# What runs on a node as Ray tasks answers with plain data:
# ("ready", python, built, version, ray), ("absent",), or ("failed", name of the exception's class, arguments)
Answer = tuple[Any, ...]


def look_here(platform: str, folder: str, fingerprint: str, shared: bool) -> Answer:
    """Answer whether this node has an environment."""
    try:
        check_platform(platform)
        ready = find_venv(folder, fingerprint, shared)
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
        return ("ready", *ensure_venv(wanted, fetch, Deadline(timeout_s)))
    except VenvError as error:
        return _report(error)
    except Exception as error:  # noqa: BLE001 - the driver reports whatever goes wrong on a node
        return _report(VenvBuildError(redact(f"{type(error).__name__}: {error}", wanted.secrets)))


def probe_here(python: str, timeout_s: float) -> Answer:
    """Ask an interpreter of this node for its versions of Python and Ray."""
    try:
        version, _, _, ray = probe(python, Runner(Deadline(timeout_s), env={}))
    except VenvError as error:
        return _report(error)
    return ("ready", python, False, version, ray)


def _report(error: VenvError) -> Answer:
    return ("failed", type(error).__name__, error.__reduce__()[1])
