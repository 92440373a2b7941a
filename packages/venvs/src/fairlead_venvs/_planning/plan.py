# SPDX-License-Identifier: Apache-2.0
"""From a spec to a recipe: everything that the driver reads and decides before it calls a node."""

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._build.recipe import File, Recipe, this_platform, this_python
from .._build.redact import redact
from .._build.store import FORMAT, check_name, venv_root
from .._build.uv import Runner, Session
from ..exceptions import VenvBuildError
from .project import Project, read_project
from .requirements import Resolution, installed_lines, is_wheel, resolve
from .settings import Settings, read_settings
from .spec import BaseSpec
from .wheel import ensure_wheel, hash_file

DISTRIBUTIONS = (".whl", ".tar.gz", ".zip")


@dataclass(frozen=True)
class Plan:
    """The driver's decisions about a spec; the recipe is a draft before the requirements are resolved."""

    spec: BaseSpec
    settings: Settings
    project: Project | None
    files: tuple[File, ...]
    hashes: Mapping[Path, str]  # of the files that may change
    recipe: Recipe

    def check_files(self) -> None:
        """Check that no file has changed since the fingerprint counted it."""
        if changed := [path for path, content in self.hashes.items() if hash_file(path) != content]:
            raise VenvBuildError(f"{changed[0]} was changed meanwhile. Try again.")

    def check_lock(self, session: Session) -> None:
        """Check that the lock of the project matches its pyproject, unless the spec is frozen."""
        if self.project is None or self.spec.frozen:
            return
        self.settings.make_runner(session).uv(
            # Without --python, uv would take the interpreter of an environment beside the project.
            *("lock", "--check", "--python", sys.executable),
            cwd=self.project.root,
            failed=f"the lock in {self.project.root} does not match its pyproject.toml. Run `uv lock` there, or "
            "use it as it is with frozen=True",
        )

    def resolve(self, session: Session | None = None, *, refresh: bool = False) -> Resolution:
        """Return the resolution of the requirements: the stored one, or a new one by uv, also for `refresh`."""
        if not self.recipe.requirements:
            return Resolution()
        runner = self.settings.make_runner(session)
        return resolve(self.recipe, self.spec.requirements or (), self.files, runner, self.check_files, refresh)

    def complete(self, resolution: Resolution, name: str | None = None) -> "Plan":
        """Return this draft with its recipe completed. Reads nothing and starts no process."""
        draft = self.recipe
        facts = [draft.request, resolution.pins, sorted(resolution.direct.items())]
        fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        lines = draft.requirements
        recipe = dataclasses.replace(
            draft,
            fingerprint=fingerprint,
            folder=os.path.join(draft.folder, f"{name or _make_name(self.project)}-{fingerprint[:12]}"),
            requirements=None if lines is None else installed_lines(self.spec.requirements or (), lines, resolution),
        )
        return dataclasses.replace(self, recipe=recipe)


def plan_venv(
    spec: BaseSpec, name: str | None = None, session: Session | None = None, *, refresh: bool = False
) -> Plan:
    """Decide the content of an environment; a process is started only to build a wheel or to resolve requirements."""
    name = None if name is None else check_name(name)
    draft = read_draft(spec, session)
    return draft.complete(draft.resolve(session, refresh=refresh), name)


def read_draft(spec: BaseSpec, session: Session | None = None) -> Plan:
    """Read everything that decides the content of an environment, and build a project's wheel if it has changed."""
    project = read_project(spec)
    settings = read_settings(spec, project=project.deciding if project else "")
    secrets = settings.secrets
    files: list[File] = []
    links = [*settings.links]
    python = spec.python or this_python()
    facts: dict[str, Any] = {
        "env": settings.counted,
        "find_links": [_add_links(link, number, files, links, secrets) for number, link in enumerate(spec.find_links)],
        "format": FORMAT,
        "implementation": sys.implementation.name,
        "index": redact(spec.index or "", secrets),
        "no_index": spec.no_index,
        "platform": this_platform(),
        "python": python,
        "setup": [redact(argument, secrets) for argument in spec.setup],
        "system_site_packages": os.path.realpath(sys.executable) if spec.system_site_packages else False,
    }
    lines: tuple[str, ...] | None = None
    wheels: tuple[str, ...] = ()
    folder = ""
    if project is None:
        lines, facts["requirements"] = _add_requirements(spec.requirements or (), files, secrets)
    else:
        folder, hashes = _add_lock(project, files)
        built = _build_wheels(project, spec, settings, settings.make_runner(session))
        wheels = tuple(f"own/{wheel.name}" for wheel, _ in built.values())
        files += zip(wheels, (wheel for wheel, _ in built.values()), strict=True)
        facts["project"] = {
            "deciding": redact(project.deciding, secrets),
            "extras": project.extras,
            "files": hashes,
            "groups": project.groups,
            "lock": hashlib.sha256(project.lock).hexdigest(),
            "name": project.name,
            "wheels": {name: content for name, (_, content) in built.items()},
            # The lock of a frozen spec is not checked, so a spec that is not frozen must not get its environment.
            **({"frozen": True} if spec.frozen else {}),
        }
    recipe = Recipe(
        fingerprint="",
        request=hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest(),
        folder=str(venv_root()),
        platform=this_platform(),
        python=python,
        implementation=sys.implementation.name,
        system_site_packages=spec.system_site_packages,
        requirements=lines,
        sync=project.sync_arguments() if project else (),
        project=folder,
        wheels=wheels,
        links=tuple(links),
        no_index=spec.no_index,
        env=settings.env,
        setup=tuple(spec.setup),
        description=_describe(spec, project),
        secrets=secrets,
    )
    seen = {one: hash_file(one) for name, one in files if isinstance(one, Path) and name not in wheels}
    return Plan(spec, settings, project, tuple(files), seen, recipe)


def _add_links(link: str, number: int, files: list[File], links: list[str], secrets: frozenset[str]) -> Any:
    """Add a folder of distributions to the files and links; return the facts that the fingerprint counts."""
    if "://" in link:
        links.append(link)
        return redact(link, secrets)
    if not os.path.isdir(link):
        raise ValueError(f"find_links: there is no folder {link}")
    links.append(f"links/{number}")
    found = sorted(path for path in Path(link).iterdir() if path.name.endswith(DISTRIBUTIONS))
    files += [(f"links/{number}/{path.name}", path) for path in found]
    return [(path.name, hash_file(path)) for path in found]


def _add_requirements(
    requirements: Any, files: list[File], secrets: frozenset[str]
) -> tuple[tuple[str, ...], list[str | tuple[str, str]]]:
    """Add wheels to the files; return the lines for uv, and the facts that the fingerprint counts."""
    lines: list[str] = []
    facts: list[str | tuple[str, str]] = []
    for requirement in requirements:
        if is_wheel(requirement):
            path = Path(requirement)
            content = hash_file(path)
            # Two wheels may have the same name.
            staged = f"wheels/{content[:12]}/{path.name}"
            files += [] if staged in dict(files) else [(staged, path)]
            lines.append(f"./{staged}")
            facts.append((path.name, content))
        else:
            lines.append(requirement)
            facts.append(redact(requirement, secrets))
    return tuple(lines), sorted(facts, key=str)


def _add_lock(project: Project, files: list[File]) -> tuple[str, list[tuple[str, str]]]:
    """Add the lock, its settings and local distributions to the files; return its folder, and the latter's hashes."""
    relative = [path for path in project.files if not os.path.isabs(path)]
    above = max((os.path.normpath(path).split(os.sep).count("..") for path in relative), default=0)
    folder = "/".join(["up"] * above + ["project"])
    files.append((f"{folder}/uv.lock", project.lock))
    files += [(f"{folder}/{name}", content) for name, content in project.settings.items()]
    there = [(path, file) for path in relative if (file := project.root / path).is_file()]
    files += [(os.path.normpath(f"{folder}/{path}"), file.resolve()) for path, file in there]
    return folder, [(file.name, hash_file(file)) for _, file in there]


def _build_wheels(project: Project, spec: BaseSpec, settings: Settings, runner: Runner) -> dict[str, tuple[Path, str]]:
    """Build the wheels of the local folders; return them with their hashes, by the names of the projects."""
    own, variables = project.folder.resolve(), repr(sorted(settings.counted.items()))
    folders = {local.name: (project.root / local.path).resolve() for local in project.folders if local.installable}
    return {
        name: ensure_wheel(folder, root=venv_root(), python=project.python, variables=variables, runner=runner)
        for name, folder in folders.items()
        if spec.install_project or folder != own
    }


def _make_name(project: Project | None) -> str:
    name = project.name if project else ""
    fitting = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in name)
    return fitting.strip("-")[:60] or "venv"


def _describe(spec: BaseSpec, project: Project | None) -> str:
    if project is None:
        return redact(", ".join(os.path.basename(one) if is_wheel(one) else one for one in spec.requirements or ()))
    extras = f"[{','.join(project.extras)}]" if project.extras else ""
    return f"project {project.name or project.folder.name}{extras}" + "".join(f" +{group}" for group in project.groups)
