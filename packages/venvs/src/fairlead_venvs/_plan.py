# SPDX-License-Identifier: Apache-2.0
"""From a spec to a recipe: what is read on the driver, before anything is asked of a node."""

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._layout import FORMAT, checked_name, venv_root
from ._project import Project, read_project
from ._recipe import Recipe, this_platform
from ._redact import ambient_secrets, is_secret_name, redacted, secret_digest, secrets_of, secrets_of_command
from ._requirements import is_wheel
from ._spec import VenvSpec
from ._uv import Deadline, Runner, find_uv
from ._wheel import file_hash, wheel_of
from .exceptions import VenvBuildError, VenvError

__all__ = ["Plan", "planned"]

DISTRIBUTIONS = (".whl", ".tar.gz", ".zip")
# Variables that decide how fast or by what road something is built, not what comes of it.
NOT_DECIDING = (
    *("ALL_PROXY", "HTTP", "NO_PROXY", "RUST_LOG", "SSL_"),
    *("UV_CACHE_DIR", "UV_COMPILE_BYTECODE", "UV_CONCURRENT_", "UV_HTTP_", "UV_LINK_MODE", "UV_LOG_", "UV_NATIVE_TLS"),
    *("UV_NO_CACHE", "UV_NO_PROGRESS", "UV_OFFLINE", "UV_REQUEST_", "UV_SYSTEM_CERTS"),
)
# They open an index and do not decide what it offers: a new password is not a new environment.
INDEX_CREDENTIAL = r"UV_INDEX_\w+_(USERNAME|PASSWORD)"

File = tuple[str, "bytes | Path"]


@dataclass(frozen=True)
class Plan:
    """A recipe, and what only the driver has.

    Attributes:
        recipe: what is shipped to the nodes.
        files: relative paths and what stands there.
        spec: what was asked for.
        project: if it is one.
    """

    recipe: Recipe
    files: tuple[File, ...]
    spec: VenvSpec
    project: Project | None

    def check(self, deadline: Deadline, show: Callable[[str], None] | None = None) -> None:
        """Whether the lock matches the pyproject, asked of uv before a build.

        Raises:
            VenvBuildError: it does not.
        """
        if self.project is None or self.spec.frozen:
            return
        command = [find_uv(deadline), "lock", "--check", *(["--no-index"] if self.spec.no_index else [])]
        _runner(self.spec, self.recipe.secrets, deadline, show).run(
            # It would take the interpreter of an environment it found beside the project.
            [*command, "--python", sys.executable],
            cwd=self.project.root,
            failed=f"the lock in {self.project.root} does not match its pyproject.toml. Run `uv lock` there, or "
            "say frozen=True to use it as it is",
        )


def planned(
    spec: VenvSpec,
    name: str | None = None,
    *,
    deadline: Deadline | None = None,
    show: Callable[[str], None] | None = None,
) -> Plan:
    """Read everything that decides the content of an environment; a project's wheel is built if its source changed.

    Args:
        spec: what is asked for.
        name: first part of the folder's name; by default the project's.
        deadline: for the wheel.
        show: is called with what is printed meanwhile.
    """
    deadline = deadline or Deadline(1800)
    name = None if name is None else checked_name(name)
    root = venv_root()
    python = spec.python or ".".join(map(str, sys.version_info[:2]))
    implementation = sys.implementation.name
    secrets = _secrets(spec)
    facts: dict[str, Any] = {
        "env": {name: redacted(value, secrets) for name, value in spec.env.items() if _decides(name)},
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
    files: list[File] = []
    links: list[str] = []
    facts["find_links"] = [_linked(link, number, files, links, secrets) for number, link in enumerate(spec.find_links)]
    project: Project | None = None
    requirements: tuple[str, ...] | None = None
    wheels: tuple[str, ...] = ()
    folder = ""
    if spec.project is None:
        requirements, facts["requirements"] = _required(spec.requirements or (), files, secrets)
    else:
        project = read_project(
            spec.project,
            extras=spec.extras,
            groups=spec.groups,
            default_groups=spec.default_groups,
            no_groups=spec.no_groups,
            python=python,
        )
        deciding = json.dumps(project.deciding, sort_keys=True, default=str)
        secrets |= secrets_of([deciding])
        folder, hashes = _lock_files(project, files)
        runner = _runner(spec, secrets, deadline, show)
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
    fingerprint = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    called = name or _fitting(project.name if project else "") or "venv"
    recipe = Recipe(
        fingerprint=fingerprint,
        folder=str(root / f"{called}-{fingerprint[:12]}"),
        platform=facts["platform"],
        python=python,
        implementation=implementation,
        system_site_packages=spec.system_site_packages,
        requirements=requirements,
        sync=project.sync_arguments() if project else (),
        project=folder,
        wheels=wheels,
        links=tuple(links),
        no_index=spec.no_index,
        env={**spec.env, **({} if spec.index is None else {"UV_DEFAULT_INDEX": spec.index})},
        setup=tuple(spec.setup),
        about=_about(spec, project),
        secrets=secrets,
    )
    return Plan(recipe, tuple(files), spec, project)


def _secrets(spec: VenvSpec) -> frozenset[str]:
    named = {value for name, value in spec.env.items() if is_secret_name(name) and len(value) > 3}
    texts = [*spec.env.values(), *spec.find_links, spec.index or "", *(spec.requirements or ())]
    return frozenset(named) | secrets_of(texts) | secrets_of_command(spec.setup)


def _secret_facts(spec: VenvSpec) -> dict[str, str]:
    """Digests of the secrets that may decide the content: all but the credentials of uv's indexes."""
    facts = {
        name: secret_digest(name, value)
        for name, value in spec.env.items()
        if is_secret_name(name) and not re.fullmatch(INDEX_CREDENTIAL, name) and not _is_neutral(name)
    }
    if secrets_of_command(spec.setup):
        facts["setup"] = secret_digest("setup", "\0".join(spec.setup))
    return facts


def _decides(name: str) -> bool:
    return not is_secret_name(name) and not _is_neutral(name)


def _is_neutral(name: str) -> bool:
    return name.upper().startswith(NOT_DECIDING)


def _runner(spec: VenvSpec, secrets: frozenset[str], deadline: Deadline, show: Callable[[str], None] | None) -> Runner:
    env = dict(spec.env)
    if spec.find_links:
        env["UV_FIND_LINKS"] = ",".join(spec.find_links)
    if spec.index is not None:
        env["UV_DEFAULT_INDEX"] = spec.index
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
