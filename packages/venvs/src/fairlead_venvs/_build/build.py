# SPDX-License-Identifier: Apache-2.0
"""Building one environment on this machine: looked for, locked, built aside, verified, published in one step.

This module and what it imports from here travel to the nodes by value: it needs nothing but uv.
"""

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..exceptions import VenvBuildError, VenvError, VenvMismatchError, VenvTimeoutError
from .install import install, lay_out, verified
from .kernel_lock import KernelLock
from .publish import discard, leftover_name, publish, sweep
from .recipe import Files, Outcome, Recipe, this_platform
from .redact import ambient_secrets, redacted
from .sharing import is_shared
from .store import BUILDING, FORMAT, USED, entries_of, lock_path, look, mark_used, python_of, write_manifest
from .uv import Deadline, Runner, find_uv

__all__ = ["ensure", "found", "locked"]

# What a waiter may lose after another process has finished what it waits for: at first in seconds, later as a share of
# what it has waited, for the nodes of a cluster may all look at one shared folder; at most, in seconds.
POLL_S, POLL_SHARE, POLL_AT_MOST_S = 0.02, 0.05, 1.0


def found(folder: str, fingerprint: str) -> Outcome | None:
    """The environment, if it is complete: no lock is taken and nothing is started."""
    manifest = look(folder, fingerprint)
    if manifest is None:
        return None
    mark_used(folder)
    return Outcome(python_of(folder), False, manifest["python"], manifest["ray"], is_shared(folder))


def ensure(
    recipe: Recipe,
    files: Files,
    *,
    force: bool = False,
    deadline: Deadline,
    show: Callable[[str], None] | None = None,
) -> Outcome:
    """The environment of a recipe, built if need be.

    Raises:
        VenvMismatchError: it is for another platform.
        VenvBuildError: it cannot be built.
        VenvTimeoutError: it is not there by the deadline.
        UvUnavailableError: there is no uv that will do.
    """
    if recipe.platform != this_platform():
        raise VenvMismatchError("platform", this_platform(), recipe.platform, "This machine")

    def there() -> Outcome | None:
        return None if force else found(recipe.folder, recipe.fingerprint)

    ready = there()
    if ready is not None:
        return ready
    folder = Path(recipe.folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder, deadline, lambda: there() is not None):
            return there() or _built(recipe, files, folder, force, deadline, show)
    except OSError as error:
        if isinstance(error, VenvError):
            raise  # VenvTimeoutError is an OSError, too
        raise VenvBuildError(
            f"{error}. The folder of all environments, {folder.parent} (FAIRLEAD_VENV_DIR), must be writable and have "
            "room."
        ) from None


@contextlib.contextmanager
def locked(folder: Path, deadline: Deadline, done: Callable[[], bool], *, doing: str = "builds") -> Iterator[None]:
    """Hold a kernel lock, which ends with its owner, or go on without it as soon as another process has done the work.

    It saves work, no more: what is right does not depend on it. Where the file system knows no locks there is none.
    """
    lock = KernelLock(lock_path(folder))
    began = time.monotonic()
    while not done() and not lock.acquire():
        if not deadline.left():
            raise VenvTimeoutError(f"waiting for another process that {doing} {folder}", deadline.timeout_s)
        pause = min(max(POLL_S, POLL_SHARE * (time.monotonic() - began)), POLL_AT_MOST_S)
        time.sleep(min(pause, deadline.left()))
    try:
        yield
    finally:
        lock.release()


def _links(recipe: Recipe, stage: Path) -> list[str]:
    """Return where uv finds distributions; without the driver's folders that this machine does not have."""
    absolute = [link if "://" in link else str(stage / link) for link in recipe.links]
    return [link for link in absolute if "://" in link or os.path.isdir(link)]


def _built(
    recipe: Recipe, files: Files, folder: Path, force: bool, deadline: Deadline, show: Callable[[str], None] | None
) -> Outcome:
    began = time.time()
    sweep(folder)
    uv = find_uv(deadline)
    aside = leftover_name(folder, BUILDING)
    try:
        env, stage = aside / "env", aside / "stage"
        stage.mkdir(parents=True, mode=0o700)
        lay_out(files(), stage)
        # By variables, not arguments: those can be seen by everybody on the machine.
        variables = dict(recipe.env)
        if links := _links(recipe, stage):
            variables["UV_FIND_LINKS"] = ",".join(links)
        if recipe.config:
            variables["UV_CONFIG_FILE"] = str(stage / recipe.config)
        secrets = recipe.secrets | ambient_secrets()
        runner = Runner(deadline, env=variables, secrets=secrets, show=show)
        install(recipe, uv, env, stage, runner)
        version, ray = verified(env, recipe, runner)
        manifest = {
            "about": redacted(recipe.about, secrets),
            "built_at": began,
            "entries": entries_of(env),
            "fingerprint": recipe.fingerprint,
            "format": FORMAT,
            "implementation": recipe.implementation,
            "platform": recipe.platform,
            "python": version,
            "ray": ray,
            "request": recipe.request,
            "seconds": round(time.time() - began, 3),
        }
        # As open to others as the root will have it: its own folder is in the way until it is published.
        (env / USED).mkdir(mode=0o777)
        os.chmod(env / USED, stat.S_IMODE(os.stat(folder.parent).st_mode) | stat.S_IRWXU)
        write_manifest(env, manifest)
        mine = publish(env, folder, lambda: not force and look(folder, recipe.fingerprint) is not None)
        if mine and env.exists():
            discard(env, folder)
        mark_used(folder)
        return Outcome(python_of(folder), mine, version, ray, is_shared(folder))
    finally:
        shutil.rmtree(aside, ignore_errors=True)
