# SPDX-License-Identifier: Apache-2.0
"""From a spec to a recipe: what is read on the driver, before anything is asked of a node."""

import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._build.recipe import Recipe, this_platform
from .._build.redact import ambient_secrets, is_secret_name, redacted, secret_digest, secrets_of, secrets_of_command
from .._build.store import FORMAT, checked_name, venv_root
from .._build.uv import Deadline, Runner, find_uv
from .._build.variables import is_index_credential, is_neutral
from .._spec import VenvSpec
from ..exceptions import VenvBuildError, VenvError
from .project import Project, read_project
from .requirements import is_wheel
from .resolution import Resolution, find_resolution, installed_lines, resolve
from .settings import Settings, read_settings
from .wheel import file_hash, wheel_of

__all__ = ["Plan", "Request", "make_plan", "planned", "read_request"]

# For who gives no deadline, in seconds.
DEADLINE_S = 1800.0
DISTRIBUTIONS = (".whl", ".tar.gz", ".zip")
# How many digests of secrets a process keeps.
DIGESTS = 256

File = tuple[str, "bytes | Path"]


@dataclass(frozen=True)
class Request:
    """What is asked for, as it was read on the driver.

    Attributes:
        key: a hash of all input to uv.
        spec: that was read.
        settings: uv's, of the spec and of the driver.
        project: if it is one.
        root: of all environments.
        python: version of the interpreter.
        requirements: lines for uv, which takes wheels from the files; None for a project.
        wheels: the project's, among the files.
        folder: of the project's lock, among the files.
        links: folders among the files, and others, where uv finds distributions.
        files: relative paths and what stands there.
        secrets: what must not be seen.
    """

    key: str
    spec: VenvSpec
    settings: Settings
    project: Project | None
    root: Path
    python: str
    requirements: tuple[str, ...] | None
    wheels: tuple[str, ...]
    folder: str
    links: tuple[str, ...]
    files: tuple[File, ...]
    secrets: frozenset[str]

    def resolve(
        self,
        deadline: Deadline | None = None,
        show: Callable[[str], None] | None = None,
        *,
        refresh: bool = False,
    ) -> Resolution:
        """Return what the requirements stand for: as it was resolved before, or by uv.

        Args:
            deadline: for uv.
            show: is called with what is printed meanwhile.
            refresh: resolve again.

        Raises:
            VenvBuildError: nothing satisfies them.
        """
        if not self.requirements:
            return Resolution()
        if not refresh and (ready := find_resolution(self.root, self.key)) is not None:
            return ready
        deadline = deadline or Deadline(DEADLINE_S)
        return resolve(
            self.key,
            self.spec.requirements or (),
            self.requirements,
            [(name, content) for name, content in self.files if f"./{name}" in self.requirements],
            root=self.root,
            python=self.python,
            implementation=sys.implementation.name,
            no_index=self.spec.no_index,
            runner=_runner(self.spec, self.settings, self.secrets, deadline, show),
            deadline=deadline,
            secrets=self.secrets,
            refresh=refresh,
        )


@dataclass(frozen=True)
class Plan:
    """A recipe, and what only the driver has.

    Attributes:
        recipe: what is shipped to the nodes.
        request: what was asked for.
    """

    recipe: Recipe
    request: Request

    @property
    def files(self) -> tuple[File, ...]:
        """Relative paths and what stands there."""
        return self.request.files

    def check(self, deadline: Deadline, show: Callable[[str], None] | None = None) -> None:
        """Whether the lock matches the pyproject, asked of uv before a build.

        Raises:
            VenvBuildError: it does not.
        """
        request, project, spec = self.request, self.request.project, self.request.spec
        if project is None or spec.frozen:
            return
        command = [find_uv(deadline), "lock", "--check", *(["--no-index"] if spec.no_index else [])]
        _runner(spec, request.settings, request.secrets, deadline, show).run(
            # It would take the interpreter of an environment it found beside the project.
            [*command, "--python", sys.executable],
            cwd=project.root,
            failed=f"the lock in {project.root} does not match its pyproject.toml. Run `uv lock` there, or "
            "say frozen=True to use it as it is",
        )


def planned(
    spec: VenvSpec,
    name: str | None = None,
    *,
    deadline: Deadline | None = None,
    show: Callable[[str], None] | None = None,
    refresh: bool = False,
    check: Callable[[VenvSpec, Project | None], None] | None = None,
) -> Plan:
    """Decide the content of an environment. Nothing is started for what has been asked for before and has not changed.

    A project's wheel is built if its source changed; requirements are resolved if they have not been.

    Args:
        spec: what is asked for.
        name: first part of the folder's name; by default the project's.
        deadline: for the wheel and the resolution.
        show: is called with what is printed meanwhile.
        refresh: resolve the requirements again.
        check: is called with the spec and its project before anything is started, and may raise.
    """
    name = None if name is None else checked_name(name)
    request = read_request(spec, deadline=deadline, show=show, check=check)
    return make_plan(request, request.resolve(deadline, show, refresh=refresh), name)


def make_plan(request: Request, resolution: Resolution, name: str | None = None) -> Plan:
    """Return how to build what was asked for. Nothing is read and nothing started.

    Args:
        request: what was asked for.
        resolution: of its requirements; an empty one for a project, whose lock says what they are.
        name: first part of the folder's name; by default the project's.
    """
    spec, project, settings = request.spec, request.project, request.settings
    facts = [request.key, resolution.pins, sorted(resolution.direct.items())]
    fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    lines = request.requirements
    called = name or _fitting(project.name if project else "") or "venv"
    recipe = Recipe(
        fingerprint=fingerprint,
        request=request.key,
        folder=str(request.root / f"{called}-{fingerprint[:12]}"),
        platform=this_platform(),
        python=request.python,
        implementation=sys.implementation.name,
        system_site_packages=spec.system_site_packages,
        requirements=None if lines is None else installed_lines(spec.requirements or (), lines, resolution),
        sync=project.sync_arguments() if project else (),
        project=request.folder,
        wheels=request.wheels,
        links=request.links,
        config=settings.config,
        build_constraints=settings.build_constraints,
        no_index=spec.no_index,
        env=settings.env,
        setup=tuple(spec.setup),
        about=_about(spec, project),
        secrets=request.secrets,
    )
    return Plan(recipe, request)


def read_request(
    spec: VenvSpec,
    *,
    deadline: Deadline | None = None,
    show: Callable[[str], None] | None = None,
    check: Callable[[VenvSpec, Project | None], None] | None = None,
) -> Request:
    """Read everything that decides the content of an environment; a project's wheel is built if its source changed.

    Args:
        spec: what is asked for.
        deadline: for the wheel.
        show: is called with what is printed meanwhile.
        check: is called with the spec and its project before anything is started, and may raise.
    """
    deadline = deadline or Deadline(DEADLINE_S)
    root = venv_root()
    python = spec.python or ".".join(map(str, sys.version_info[:2]))
    implementation = sys.implementation.name
    project = None
    if spec.project is not None:
        project = read_project(
            spec.project,
            extras=spec.extras,
            groups=spec.groups,
            default_groups=spec.default_groups,
            no_groups=spec.no_groups,
            python=python,
        )
    if check is not None:
        check(spec, project)
    settings = read_settings(spec)
    secrets = _secrets(spec) | settings.secrets
    facts: dict[str, Any] = {
        "env": settings.counted,
        "format": FORMAT,
        "implementation": implementation,
        "index": redacted(spec.index or "", secrets),
        "no_index": spec.no_index,
        "platform": this_platform(),
        "python": python,
        "setup": [redacted(argument, secrets) for argument in spec.setup],
        "system_site_packages": os.path.realpath(sys.executable) if spec.system_site_packages else False,
    }
    if counted := _secret_facts(spec):
        facts["secrets"] = counted
    files: list[File] = list(settings.files)
    links: list[str] = list(settings.links)
    facts["find_links"] = [_linked(link, number, files, links, secrets) for number, link in enumerate(spec.find_links)]
    requirements: tuple[str, ...] | None = None
    wheels: tuple[str, ...] = ()
    folder = ""
    if project is None:
        requirements, facts["requirements"] = _required(spec.requirements or (), files, secrets)
    else:
        deciding = json.dumps(project.deciding, sort_keys=True, default=str)
        secrets |= secrets_of([deciding])
        folder, hashes = _lock_files(project, files)
        runner = _runner(spec, settings, secrets, deadline, show)
        wheels, built = _wheels(project, spec, root, python, implementation, runner, deadline, files)
        facts["project"] = {
            "deciding": redacted(deciding, secrets),
            "extras": project.extras,
            "files": hashes,
            "groups": project.groups,
            "lock": hashlib.sha256(project.lock).hexdigest(),
            "name": project.name,
            "wheels": built,
        }
        if spec.frozen:
            # Nobody has checked this lock: a spec that asks for the check must not get this environment.
            facts["project"]["frozen"] = True
    return Request(
        key=hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest(),
        spec=spec,
        settings=settings,
        project=project,
        root=root,
        python=python,
        requirements=requirements,
        wheels=wheels,
        folder=folder,
        links=tuple(links),
        files=tuple(files),
        secrets=secrets,
    )


def _secrets(spec: VenvSpec) -> frozenset[str]:
    texts = [*spec.find_links, spec.index or "", *(spec.requirements or ())]
    return secrets_of(texts) | secrets_of_command(spec.setup)


def _secret_facts(spec: VenvSpec) -> dict[str, str]:
    """Digests of the secrets that may decide the content: all but the credentials of uv's indexes."""
    facts = {
        name: _digest(name, value)
        for name, value in spec.env.items()
        if is_secret_name(name) and not is_index_credential(name) and not is_neutral(name)
    }
    if secrets_of_command(spec.setup):
        facts["setup"] = _digest("setup", "\0".join(spec.setup))
    return facts


# It costs some 50 ms on purpose.
_digest = functools.lru_cache(maxsize=DIGESTS)(secret_digest)


def _runner(
    spec: VenvSpec,
    settings: Settings,
    secrets: frozenset[str],
    deadline: Deadline,
    show: Callable[[str], None] | None,
) -> Runner:
    env = {**settings.env, **settings.here}
    if spec.find_links:
        env["UV_FIND_LINKS"] = ",".join(spec.find_links)
    return Runner(deadline, env=env, secrets=secrets | ambient_secrets(), show=show)


def _linked(link: str, number: int, files: list[File], links: list[str], secrets: frozenset[str]) -> Any:
    """Take the distributions of a folder along; what counts of it."""
    if "://" in link:
        links.append(link)
        return redacted(link, secrets)
    if not os.path.isdir(link):
        raise ValueError(f"find_links: there is no folder {link}")
    links.append(f"links/{number}")
    found = sorted(path for path in Path(link).iterdir() if path.name.endswith(DISTRIBUTIONS))
    files += [(f"links/{number}/{path.name}", path) for path in found]
    return [(path.name, file_hash(path)) for path in found]


def _required(
    requirements: Any, files: list[File], secrets: frozenset[str]
) -> tuple[tuple[str, ...], list[str | tuple[str, str]]]:
    """Lines for uv, and what counts of them."""
    lines: list[str] = []
    counts: list[str | tuple[str, str]] = []
    for requirement in requirements:
        if is_wheel(requirement):
            path = Path(requirement)
            content = file_hash(path)
            # Two may have the same name.
            staged = f"wheels/{content[:12]}/{path.name}"
            files.append((staged, path))
            lines.append(f"./{staged}")
            counts.append((path.name, content))
        else:
            lines.append(requirement)
            counts.append(redacted(requirement, secrets))
    return tuple(lines), sorted(counts, key=str)


def _lock_files(project: Project, files: list[File]) -> tuple[str, list[tuple[str, str]]]:
    """Take lock and settings along, and local distributions at the same relative paths; hashes of the latter."""
    relative = [file.path for file in project.files if not os.path.isabs(file.path)]
    above = max((os.path.normpath(path).split(os.sep).count("..") for path in relative), default=0)
    folder = "/".join(["up"] * above + ["project"])
    files.append((f"{folder}/uv.lock", project.lock))
    files += [(f"{folder}/{name}", content) for name, content in project.settings.items()]
    there = [(path, project.root / path) for path in relative]
    files += [(os.path.normpath(f"{folder}/{path}"), file.resolve()) for path, file in there if file.is_file()]
    return folder, [(file.name, file_hash(file)) for _, file in there if file.is_file()]


def _wheels(
    project: Project,
    spec: VenvSpec,
    root: Path,
    python: str,
    implementation: str,
    runner: Runner,
    deadline: Deadline,
    files: list[File],
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Wheels of the local folders, as staged, and the hash of each."""
    staged, hashes = [], {}
    for local in project.folders:
        folder = (project.root / local.path).resolve()
        own = folder == project.folder.resolve()
        if not local.installable or (own and not spec.install_project):
            continue
        try:
            wheel, content = wheel_of(
                folder,
                root=root,
                python=python,
                implementation=implementation,
                no_index=spec.no_index,
                runner=runner,
                deadline=deadline,
            )
        except OSError as error:
            if isinstance(error, VenvError):
                raise  # VenvTimeoutError is an OSError, too
            raise VenvBuildError(
                f"the wheel of {folder} could not be made in {root} (FAIRLEAD_VENV_DIR): {error}"
            ) from None
        hashes[local.name] = content
        staged.append(f"own/{wheel.name}")
        files.append((f"own/{wheel.name}", wheel))
    return tuple(staged), hashes


def _fitting(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in name).strip("-")[:60]


def _about(spec: VenvSpec, project: Project | None) -> str:
    if project is None:
        return redacted(", ".join(os.path.basename(one) if is_wheel(one) else one for one in spec.requirements or ()))
    extras = f"[{','.join(project.extras)}]" if project.extras else ""
    return f"project {project.name or project.folder.name}{extras}" + "".join(f" +{group}" for group in project.groups)
