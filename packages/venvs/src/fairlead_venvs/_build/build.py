# SPDX-License-Identifier: Apache-2.0
"""One environment on this machine: find it, or build it aside, verify it, and publish it in one step."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ..exceptions import VenvBuildError, VenvMismatchError
from .permissions import share
from .publish import discard, make_once, publish
from .recipe import File, Outcome, Recipe, this_platform, this_python
from .redact import ambient_secrets, redact
from .store import python_of, read_manifest, write_manifest
from .users import USED, mark_used
from .uv import Runner, Session

Check = Callable[[], object]


def find_venv(folder: str, fingerprint: str) -> Outcome | None:
    """Return an environment if it is complete, else None. Takes no lock and starts no process."""
    manifest = read_manifest(folder, fingerprint)
    if manifest is None:
        return None
    mark_used(folder)
    return Outcome(python_of(folder), False, manifest["python"], manifest["ray"])


def ensure_venv(
    recipe: Recipe, files: Callable[[], Iterable[File]], session: Session, *, force: bool = False, check: Check = bool
) -> Outcome:
    """Return the environment of a recipe, built if it is missing or with `force`. `check` raises if files changed."""
    if recipe.platform != this_platform():
        raise VenvMismatchError("platform", this_platform(), recipe.platform, "This machine")
    folder = Path(recipe.folder)

    def find() -> Outcome | None:
        return None if force else find_venv(recipe.folder, recipe.fingerprint)

    def build(aside: Path) -> Outcome:
        began = time.time()
        env, stage = aside / "env", aside / "stage"
        stage.mkdir(mode=0o700)
        env.mkdir()
        mode = os.stat(env).st_mode
        share(env, folder.parent)
        # Only users who may write to the folder of all environments may write here, whatever the umask is.
        umask = 0o777 & ~(mode & os.stat(env).st_mode)
        lay_out(files(), stage)
        secrets = recipe.secrets | ambient_secrets()
        variables = dict(recipe.env)
        # This machine may lack a folder that the driver has.
        absolute = [link if "://" in link else str(stage / link) for link in recipe.links]
        if links := [link for link in absolute if "://" in link or os.path.isdir(link)]:
            variables["UV_FIND_LINKS"] = ",".join(links)  # not an argument, as everybody on the machine can see those
        runner = Runner(session, env=variables, secrets=secrets, no_index=recipe.no_index, umask=umask)
        install(recipe, env, stage, runner)
        version, ray = verify(env, recipe, runner)
        check()
        manifest = {
            "description": redact(recipe.description, secrets),
            "built_at": began,
            "fingerprint": recipe.fingerprint,
            "implementation": recipe.implementation,
            "platform": recipe.platform,
            "python": version,
            "ray": ray,
            "request": recipe.request,
            "seconds": round(time.time() - began, 3),
        }
        (env / ".lock").unlink(missing_ok=True)  # uv's own, which everybody may write to
        (env / USED).mkdir()
        share(env / USED, folder.parent)
        write_manifest(env, folder.parent, manifest)
        mine = publish(env, folder, lambda: not force and read_manifest(folder, recipe.fingerprint) is not None)
        if mine and env.exists():
            discard(env, folder)
        mark_used(folder)
        return Outcome(python_of(folder), mine, version, ray)

    return make_once(folder.parent, folder, find, build, session.deadline)


LINES = "requirements.txt"
PROBE = """\
import importlib.metadata as metadata, json, platform, sys
try:
    ray = metadata.version("ray")
except metadata.PackageNotFoundError:
    ray = None
print(json.dumps([platform.python_version(), sys.implementation.name, sys.prefix, ray]))
"""


def lay_out(files: Iterable[File], stage: Path) -> None:
    """Put files below a folder; files of this machine as links."""
    for name, content in files:
        path = stage / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.symlink_to(content)


def lay_out_requirements(lines: Iterable[str], stage: Path) -> None:
    """Put requirements into a folder that only this user can enter: one may be a URL with credentials."""
    # An empty uv.toml ends the search for settings in the folders above.
    (stage / "uv.toml").touch()
    (stage / LINES).write_text("\n".join(lines) + "\n", encoding="utf-8")


def choose_interpreter(python: str, implementation: str) -> str:
    """Return an interpreter for uv: this one if it fits, as uv need not search for it; else the version."""
    if implementation == sys.implementation.name and python in (this_python(), this_python(3)):
        return sys.executable
    return f"{implementation}@{python}"


def install(recipe: Recipe, env: Path, stage: Path, runner: Runner) -> None:
    """Create the environment, install everything into it, and run the setup command."""
    base = choose_interpreter(recipe.python, recipe.implementation)
    runner.uv(
        *("venv", "--relocatable", "--no-project", "--python", base),
        *(["--system-site-packages"] if recipe.system_site_packages else []),
        str(env),
        cwd=stage,
        failed=f"uv could not create an environment with Python {recipe.python}",
    )
    python = python_of(env)
    if recipe.requirements is None:
        runner.uv(
            *("sync", "--frozen", "--python", python, *recipe.sync),
            cwd=stage / recipe.project,
            env={"UV_PROJECT_ENVIRONMENT": str(env)},
            failed="uv could not install what the project's lock names",
        )
    elif recipe.requirements:
        lay_out_requirements(recipe.requirements, stage)
        runner.uv(
            *("pip", "install", "--python", python, "--no-deps", "-r", LINES),
            cwd=stage,
            failed="uv could not install the requirements",
        )
    if recipe.wheels:
        runner.uv(
            *("pip", "install", "--python", python, "--no-deps", *recipe.wheels),
            *([] if recipe.no_index else ["--no-index"]),
            cwd=stage,
            failed="uv could not install the wheels of the project's own code",
        )
    if recipe.setup:
        path = os.pathsep.join([os.path.dirname(python), runner.env.get("PATH", os.defpath)])
        program = shutil.which(recipe.setup[0], path=path) or recipe.setup[0]
        runner.run(
            [program, *recipe.setup[1:]],
            cwd=env,
            env={"PATH": path, "VIRTUAL_ENV": str(env)},
            failed="The setup command failed",
        )


def probe(python: str, runner: Runner) -> tuple[str, str, str, str | None]:
    """Run an interpreter, and return its version, implementation and prefix, and the version of its Ray or None."""
    # Isolated: neither variables nor the current folder decide where modules come from.
    output = runner.run([python, "-I", "-c", PROBE], cwd=Path("/"), failed=f"{python} does not run")
    try:
        # The last line, as code that the interpreter runs when it starts may print, too.
        version, implementation, prefix, ray = json.loads(output.splitlines()[-1])
    except (IndexError, TypeError, ValueError):
        raise VenvBuildError(f"{python} does not report its version", output=output.splitlines()) from None
    return version, implementation, prefix, ray


def verify(env: Path, recipe: Recipe, runner: Runner) -> tuple[str, str | None]:
    """Check the Python of a new environment; return its version, and that of its Ray or None."""
    version, implementation, prefix, ray = probe(python_of(env), runner)
    same = implementation == recipe.implementation and f"{version}.".startswith(f"{recipe.python}.")
    if not same or os.path.realpath(prefix) != os.path.realpath(env):
        raise VenvBuildError(
            f"{recipe.implementation} {recipe.python} was requested, and the new environment reports {implementation} "
            f"{version} in {prefix}."
        )
    return version, ray
