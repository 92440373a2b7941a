# SPDX-License-Identifier: Apache-2.0
"""The steps of one build: an empty environment, what is installed into it, and the proof that it works."""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from ..exceptions import VenvBuildError
from .recipe import Recipe
from .store import python_of
from .uv import Runner

__all__ = ["install", "interpreter_for", "lay_out", "verified"]

PROBE = """\
import importlib.metadata as metadata, json, platform, sys
try:
    ray = metadata.version("ray")
except metadata.PackageNotFoundError:
    ray = None
print(json.dumps([platform.python_version(), sys.implementation.name, sys.prefix, ray]))
"""


def lay_out(files: Iterable[tuple[str, bytes | Path]], stage: Path) -> None:
    """Put files below a folder; those of this machine as links."""
    for name, content in files:
        path = stage / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.symlink_to(content)


def interpreter_for(python: str, implementation: str) -> str:
    """What to tell uv: the interpreter that asks, if it will do, for it needs no search; else the version."""
    own = (".".join(map(str, sys.version_info[:2])), ".".join(map(str, sys.version_info[:3])))
    if implementation == sys.implementation.name and python in own:
        return sys.executable
    return f"{implementation}@{python}"


def install(recipe: Recipe, uv: str, env: Path, stage: Path, runner: Runner) -> None:
    """Make the environment and install everything, the setup command included."""
    make = [
        uv,
        "venv",
        "--relocatable",
        "--no-project",
        "--python",
        interpreter_for(recipe.python, recipe.implementation),
    ]
    if recipe.system_site_packages:
        make.append("--system-site-packages")
    runner.run([*make, str(env)], cwd=stage, failed=f"uv could not make an environment with Python {recipe.python}")
    python = python_of(env)
    no_index = ["--no-index"] if recipe.no_index else []
    if recipe.requirements is None:
        runner.run(
            [uv, "sync", "--frozen", "--python", python, *no_index, *recipe.sync],
            cwd=stage / recipe.project,
            env={"UV_PROJECT_ENVIRONMENT": str(env)},
            failed="uv could not install what the project's lock names",
        )
    elif recipe.requirements:
        # An empty uv.toml ends the search for settings in the folders above.
        (stage / "uv.toml").touch()
        runner.run(
            # Requirements may be URLs with credentials: they are no arguments, which everybody can see.
            # All that they depend on is among them.
            [uv, "pip", "install", "--python", python, "--no-deps", *no_index, "-r", "-"],
            cwd=stage,
            # Relative: uv would take a space in a path for the end of a name.
            env={"UV_BUILD_CONSTRAINT": " ".join(recipe.build_constraints)} if recipe.build_constraints else None,
            stdin="\n".join(recipe.requirements) + "\n",
            failed="uv could not install the requirements",
        )
    if recipe.wheels:
        runner.run(
            [uv, "pip", "install", "--python", python, "--no-deps", "--no-index", *recipe.wheels],
            cwd=stage,
            failed="uv could not install the wheels of the project's own code",
        )
    if recipe.setup:
        _set_up(recipe.setup, env, runner)


def _set_up(command: tuple[str, ...], env: Path, runner: Runner) -> None:
    path = os.pathsep.join([os.path.dirname(python_of(env)), runner.env.get("PATH", os.defpath)])
    program = shutil.which(command[0], path=path) or command[0]
    runner.run(
        [program, *command[1:]],
        cwd=env,
        env={"PATH": path, "VIRTUAL_ENV": str(env)},
        failed="The setup command failed",
    )


def verified(env: Path, recipe: Recipe, runner: Runner) -> tuple[str, str | None]:
    """Version of the environment's Python, and of Ray in it, as told by itself.

    Raises:
        VenvBuildError: it does not run, or is another Python than was asked for.
    """
    # Isolated: neither variables nor the current folder say where modules come from.
    said = runner.run([python_of(env), "-I", "-c", PROBE], cwd=env, failed="The new environment's Python does not run")
    version = implementation = prefix = ""
    ray = None
    with contextlib.suppress(ValueError, IndexError):
        version, implementation, prefix, ray = json.loads(said.splitlines()[-1])
    same = implementation == recipe.implementation and f"{version}.".startswith(f"{recipe.python}.")
    if not same or os.path.realpath(prefix) != os.path.realpath(env):
        raise VenvBuildError(
            f"{recipe.implementation} {recipe.python} was asked for, and the new environment answers that it is "
            f"{implementation or 'unknown'} {version} in {prefix or 'an unknown place'}.",
            output=said.splitlines(),
        )
    return version, ray
