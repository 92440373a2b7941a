# SPDX-License-Identifier: Apache-2.0
"""One environment on this machine: find it, or build it aside, verify it, and publish it in one step.

This module and what it imports are sent to the nodes by value. A node needs only uv.
"""

import os
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ..exceptions import VenvMismatchError
from .hosts import USED, is_shared, mark_used
from .install import install, lay_out, verify
from .lock import make_once
from .publish import discard, publish
from .recipe import File, Outcome, Recipe, this_platform
from .redact import ambient_secrets, redact
from .store import python_of, read_manifest, write_manifest
from .uv import Deadline, Runner


def find_venv(folder: str, fingerprint: str) -> Outcome | None:
    """Return an environment if it is complete, else None. Takes no lock and starts no process."""
    manifest = read_manifest(folder, fingerprint)
    if manifest is None:
        return None
    mark_used(folder)
    return Outcome(python_of(folder), False, manifest["python"], manifest["ray"], is_shared(folder))


def ensure_venv(
    recipe: Recipe,
    files: Callable[[], Iterable[File]],
    *,
    force: bool = False,
    deadline: Deadline,
    show: Callable[[str], None] | None = None,
) -> Outcome:
    """Return the environment of a recipe, and build it first if it is missing.

    Args:
        recipe: how to build it.
        files: returns the files of the recipe. It is only called if the environment has to be built.
        force: build it even if it is there.
        deadline: for everything together.
        show: is called with each line that is printed.

    Raises:
        VenvMismatchError: the recipe is for another platform.
        VenvBuildError: the environment cannot be built.
        VenvTimeoutError: the environment is not ready by the deadline.
        UvUnavailableError: there is no uv, or it is too old.
    """
    if recipe.platform != this_platform():
        raise VenvMismatchError("platform", this_platform(), recipe.platform, "This machine")
    folder = Path(recipe.folder)

    def find() -> Outcome | None:
        return None if force else find_venv(recipe.folder, recipe.fingerprint)

    def build(aside: Path) -> Outcome:
        began = time.time()
        env, stage = aside / "env", aside / "stage"
        stage.mkdir(parents=True, mode=0o700)
        lay_out(files(), stage)
        secrets = recipe.secrets | ambient_secrets()
        variables = _choose_variables(recipe, stage)
        runner = Runner(deadline, env=variables, secrets=secrets, no_index=recipe.no_index, show=show)
        install(recipe, env, stage, runner)
        version, ray = verify(env, recipe, runner)
        manifest = {
            "about": redact(recipe.about, secrets),
            "built_at": began,
            "fingerprint": recipe.fingerprint,
            "implementation": recipe.implementation,
            "platform": recipe.platform,
            "python": version,
            "ray": ray,
            "request": recipe.request,
            "seconds": round(time.time() - began, 3),
        }
        # With the permissions of the folder of all environments, which `env` enters when it is published.
        (env / USED).mkdir(mode=0o777)
        os.chmod(env / USED, stat.S_IMODE(os.stat(folder.parent).st_mode) | stat.S_IRWXU)
        write_manifest(env, manifest)
        mine = publish(env, folder, lambda: not force and read_manifest(folder, recipe.fingerprint) is not None)
        if mine and env.exists():
            discard(env, folder)
        mark_used(folder)
        return Outcome(python_of(folder), mine, version, ray, is_shared(folder))

    return make_once(folder.parent, folder, find, build, deadline)


def _choose_variables(recipe: Recipe, stage: Path) -> dict[str, str]:
    """Return uv's variables. Links are among them, as everybody on the machine can see arguments."""
    variables = dict(recipe.env)
    # This machine may lack a folder that the driver has.
    absolute = [link if "://" in link else str(stage / link) for link in recipe.links]
    if links := [link for link in absolute if "://" in link or os.path.isdir(link)]:
        variables["UV_FIND_LINKS"] = ",".join(links)
    if recipe.config:
        variables["UV_CONFIG_FILE"] = str(stage / recipe.config)
    return variables
