# SPDX-License-Identifier: Apache-2.0
"""From a spec to a recipe: uv exports what to install, once, and a note keeps the result for the same inputs."""

import hashlib
import json
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from packaging.markers import Marker

from ._node.build import PYLOCK, Files, Recipe, choose_interpreter, explain_errors, this_platform, this_python
from ._node.redact import find_credentials, find_secrets, is_secret_name, redact
from ._node.store import FORMAT, USED, build_folder, mark_used, prepare_root, publish, read_facts, write_facts
from ._node.uv import NOT_INHERITED, Deadline, Runner, locate_uv
from ._request import BaseSpec, is_wheel
from ._sources import build_sdist, read_state, see
from .exceptions import VenvBuildError

NOTES = ".notes"
NOTE = "note.json"
NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"
HEAD = 'lock-version = "1.0"\ncreated-by = "uv"\n\n'
# The driver's variables that say where distributions come from, and give access. Nodes need them to download.
INDEXES = re.compile(r"UV_(DEFAULT_INDEX|EXTRA_INDEX_URL|INDEX(_URL|_\w+_(USERNAME|PASSWORD))?)")


@dataclass(frozen=True)
class Plan:
    """What an environment needs: the recipe, and the files of this machine that travel with it, by relative path."""

    recipe: Recipe
    paths: Mapping[str, str]

    def read_files(self) -> Files:
        """Read the files: wheels, source distributions, and uv's settings in the project."""
        for name, path in self.paths.items():
            try:
                yield name, Path(path).read_bytes() if path else b""
            except OSError as error:
                raise VenvBuildError(f"{error}: it was there when the environment was planned. Try again.") from None

    def find_version(self, name: str) -> str | None:
        """Return the version of a package that uv will install; None if it installs none, or the lock has none."""
        packages = tomllib.loads(self.recipe.pylock).get("packages", ())
        chosen = [package for package in packages if package["name"] == name and _applies(package, self.recipe.python)]
        return chosen[0].get("version") if chosen else None


def venv_root() -> Path:
    """Return the folder of environments: `FAIRLEAD_VENV_DIR`, else one in the user's cache folder."""
    if given := os.environ.get("FAIRLEAD_VENV_DIR"):
        return Path(os.path.abspath(os.path.expanduser(given)))
    import platformdirs

    return Path(platformdirs.user_cache_dir("fairlead", appauthor=False), "venvs")


def is_shared() -> bool:
    """Return whether the members of a group share the folder of environments."""
    return os.environ.get("FAIRLEAD_VENV_SHARED") == "1"


def plan_venv(
    spec: BaseSpec, name: str | None = None, deadline: Deadline | None = None, *, refresh: bool = False
) -> Plan:
    """Decide the content of an environment. Without a note of the same inputs, or for `refresh`, uv resolves it."""
    if name is not None and (not isinstance(name, str) or not re.fullmatch(NAME, name) or ".." in name):
        raise ValueError(
            f"venv_name must be a plain word of at most 100 letters, digits, '_', '-' and '.', and must not start with "
            f"'-' or '.', got {name!r}"
        )
    deadline = deadline or Deadline(1800.0)
    inputs, root = _Inputs(spec), venv_root()
    place = root / NOTES / inputs.key

    def read() -> dict[str, Any] | None:
        return None if refresh else _read_note(place)

    with explain_errors(root):
        prepare_root(root, shared=is_shared())
        facts = read()
        if facts is None:
            done = lambda: read() is not None  # noqa: E731
            place.parent.mkdir(exist_ok=True)
            with build_folder(place, done, deadline) as aside:
                facts = read() if aside is None else _write_note(inputs, aside, place, deadline)
    if facts is None:
        raise VenvBuildError("The source of the project was changed meanwhile. Try again.")
    return _make_plan(inputs, facts, place, name)


class _Inputs:
    """A spec with the settings of this process and the files that apply to it."""

    def __init__(self, spec: BaseSpec) -> None:
        self.spec = spec
        self.folders = () if spec.project is None else _find_project(Path(spec.project))
        for link in spec.find_links:
            if "://" not in link and not os.path.isdir(link):
                raise ValueError(f"find_links: there is no folder {link}")
        given = {**spec.env, **({} if spec.index is None else {"UV_DEFAULT_INDEX": spec.index})}
        ambient = {name: value for name, value in os.environ.items() if INDEXES.fullmatch(name) and not spec.no_index}
        self.env = {**ambient, **given}  # of every node
        # uv's settings for the project, which decide how a node builds source distributions.
        settings = [root / name for root in self.folders[-1:] for name in ("uv.toml", "pyproject.toml")]
        written = {path: path.read_text("utf-8") for path in settings if path.is_file()}
        self.settings = next((path for path in written if path.name == "uv.toml" or "[tool.uv" in written[path]), None)
        text = "" if self.settings is None else written[self.settings]
        texts = [*(spec.requirements or ()), *spec.find_links, *self.env.values()]
        self.credentials = find_credentials(texts)
        named = {value for name, value in self.env.items() if is_secret_name(name) and len(value) > 3}
        self.secrets = find_secrets([*texts, text]) | named
        # Facts that every fingerprint counts.
        self.counted = [
            *(FORMAT, spec.python or this_python(), sys.implementation.name, this_platform()),
            *([self.hide(word) for word in spec.setup], self.hide_variables(spec.env), self.hide(text)),
            os.path.realpath(sys.executable) if spec.system_site_packages else "",
        ]
        self.key = self._hash()

    def hide(self, text: str) -> str:
        return redact(text, self.secrets)

    def hide_variables(self, variables: Mapping[str, str]) -> dict[str, str]:
        return {name: self.hide(value) for name, value in sorted(variables.items()) if not is_secret_name(name)}

    def _hash(self) -> str:
        """Return a hash of everything that may change what uv resolves, without credentials, and without a process."""
        spec, uv = self.spec, locate_uv()
        variables = {name: value for name, value in os.environ.items() if name.startswith("UV_")}
        variables = {name: value for name, value in variables.items() if name not in NOT_INHERITED}
        variables = self.hide_variables({**variables, **self.env})
        files = [word for value in variables.values() for word in value.split() if os.path.isfile(word)]
        files += [text for text in spec.requirements or () if is_wheel(text)]
        files += [str(path / name) for path in self.folders for name in ("pyproject.toml", "uv.toml", "uv.lock")]
        for link in spec.find_links:
            files += sorted(entry.path for entry in os.scandir(link)) if "://" not in link else []
        facts = [
            *(self.counted, this_python(3), variables, [(path, see(path)) for path in files]),
            *(uv, see(uv, links=False)),  # uv itself links its program into each environment that has uv
            *([self.hide(text) for text in (*(spec.requirements or ()), "", *spec.find_links)], str(spec.project)),
            *(spec.extras, spec.groups, spec.default_groups, spec.install_project, spec.frozen, spec.no_index),
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]

    def make_runner(self, deadline: Deadline) -> Runner:
        """Return a runner of uv on this machine."""
        links = {"UV_FIND_LINKS": ",".join(self.spec.find_links)} if self.spec.find_links else {}
        return Runner(deadline, env={**self.env, **links}, secrets=self.secrets, no_index=self.spec.no_index)


def _find_project(folder: Path) -> tuple[Path, ...]:
    """Return the folder of a project, and that of its lock."""
    if not (folder / "pyproject.toml").is_file():
        raise ValueError(f"there is no pyproject.toml in {folder}")
    for root in (folder, *folder.parents):
        if (root / "uv.lock").is_file():
            return folder, root
    raise ValueError(f"there is no uv.lock in {folder}, nor above it: run `uv lock` there")


def read_pyproject(folder: Path) -> dict[str, Any]:
    """Read the pyproject.toml of a folder; empty if there is none that this user can read."""
    try:
        return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (FileNotFoundError, PermissionError):
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / 'pyproject.toml'} cannot be read: {error}") from None


def _write_note(inputs: _Inputs, aside: Path, place: Path, deadline: Deadline) -> dict[str, Any]:
    """Let uv resolve a spec, write what it answered into a folder, and publish that."""
    new, runner = aside / "new", inputs.make_runner(deadline)
    new.mkdir()
    export = _compile(inputs.spec, aside, runner) if inputs.spec.project is None else _export(inputs, aside, runner)
    pylock, paths, folders = _localise(export, aside, inputs.spec.python or this_python())
    for number, credential in enumerate(inputs.credentials):
        pylock = pylock.replace(f"{credential}@", f"credential-{number}@")
    sources = []
    for number, folder in enumerate(folders):
        sdist, content, members, state = build_sdist(folder, aside / str(number), runner)
        (new / content).mkdir(exist_ok=True)
        sdist.rename(new / content / sdist.name)
        file = f"{content}/{sdist.name}"
        sources.append({"folder": str(folder), "file": file, "members": members, "state": state})
    seen = {path: see(path) for path in paths.values()}
    facts = {"pylock": pylock, "paths": paths, "seen": seen, "sources": sources}
    (new / USED).touch()
    write_facts(new / NOTE, facts)
    publish(new, place, lambda: False)
    return facts


def _read_note(place: Path) -> dict[str, Any] | None:
    """Return the note in a folder; None if there is none, it is damaged, or a file has changed since."""
    facts = read_facts(place / NOTE)
    try:
        if any(see(path) != seen for path, seen in facts["seen"].items()) or not isinstance(facts["pylock"], str):
            return None
        for source in facts["sources"]:
            state = read_state(Path(source["folder"]), source["members"])
            if state != source["state"] or not (place / source["file"]).is_file():
                return None
    except (AttributeError, KeyError, TypeError):
        return None
    mark_used(place)
    return facts


def _compile(spec: BaseSpec, stage: Path, runner: Runner) -> str:
    """Let uv resolve requirements. This machine need not have an interpreter of the requested version."""
    # An empty uv.toml ends the search for settings in the folders above.
    (stage / "uv.toml").touch()
    (stage / "requirements.txt").write_text("\n".join(spec.requirements or ()) + "\n", encoding="utf-8")
    python = spec.python or this_python()
    ours = choose_interpreter(python, sys.implementation.name) == sys.executable
    runner.uv(
        *("pip", "compile", "--python", sys.executable, *([] if ours else ["--python-version", python])),
        *("--no-header", "--format", PYLOCK, "--output-file", PYLOCK, "requirements.txt"),
        cwd=stage,
        failed="uv could not resolve the requirements",
    )
    return (stage / PYLOCK).read_text(encoding="utf-8")


def _export(inputs: _Inputs, stage: Path, runner: Runner) -> str:
    """Let uv export the lock of a project. It checks that the lock matches the pyproject, unless the spec is frozen."""
    spec, (folder, root) = inputs.spec, inputs.folders
    arguments = [
        *("export", "--frozen" if spec.frozen else "--locked", "--no-header", "--no-editable", "--format", PYLOCK),
        # Without --python, uv would take the interpreter of an environment beside the project.
        *("--python", sys.executable, "--output-file", str(stage / PYLOCK)),
        *(word for extra in spec.extras for word in ("--extra", extra)),
        *(word for group in spec.groups for word in ("--group", group)),
        *([] if spec.default_groups else ["--no-default-groups"]),
        *([] if spec.install_project else ["--no-emit-project"]),
    ]
    try:
        runner.uv(*arguments, cwd=folder, failed="uv could not export the lock of the project")
    except VenvBuildError as error:
        if not any("needs to be updated" in line for line in error.output):
            raise
        remedy = "Run `uv lock` there, or use it as it is with frozen=True."
        reason = f"the lock in {root} does not match its pyproject.toml. {remedy}"
        raise VenvBuildError(reason, error.command, error.output) from None
    return (stage / PYLOCK).read_text(encoding="utf-8")


def _localise(text: str, base: Path, python: str) -> tuple[str, dict[str, str], list[Path]]:
    """Return an exported lock without paths of this machine, the files that it names, and the local folders in it."""
    paths: dict[str, str] = {}
    folders: list[Path] = []
    kept: list[str] = []

    def move(match: re.Match[str]) -> str:
        place = match[2]
        if match[1] == "url" and not place.startswith("file:"):
            return match[0]
        path = os.path.normpath(base / (url2pathname(urlsplit(place).path) if match[1] == "url" else place))
        with open(path, "rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        name = f"files/{content[:16]}/{os.path.basename(path)}"
        paths[name] = path
        return f'path = "{name}"'

    for block in re.split(r"(?m)^(?=\[\[packages\]\]$)", text)[1:]:
        (package,) = tomllib.loads(block)["packages"]
        if "directory" in package:
            folders += [Path(os.path.normpath(base / package["directory"]["path"]))] * _applies(package, python)
        elif "vcs" in package:
            kept.append(block)
        else:
            block = re.sub(r'(?m)^index = "(file:|/).*\n', "", block)
            kept.append(re.sub(r'\b(url|path) = "([^"]*)"', move, block))
    return HEAD + "\n".join(block.strip() + "\n" for block in kept), paths, folders


def _applies(package: Mapping[str, Any], python: str) -> bool:
    """Return whether a package of a lock is installed with a version of Python on this platform."""
    full = this_python(3) if python == this_python() else python if python.count(".") == 2 else f"{python}.0"
    versions = {"python_version": ".".join(full.split(".")[:2]), "python_full_version": full}
    return "marker" not in package or Marker(package["marker"]).evaluate(versions)


def _make_plan(inputs: _Inputs, facts: Mapping[str, Any], place: Path, name: str | None) -> Plan:
    """Combine a spec and its note to a plan. Starts no process."""
    spec, pylock = inputs.spec, facts["pylock"]
    own = {f"own/{source['file']}": str(place / source["file"]) for source in facts["sources"]}
    counted = [*inputs.counted, pylock, sorted(own)]
    fingerprint = hashlib.sha256(json.dumps(counted).encode()).hexdigest()
    for number, credential in enumerate(inputs.credentials):
        pylock = pylock.replace(f"credential-{number}@", f"{credential}@")
    project = str(read_pyproject(inputs.folders[0]).get("project", {}).get("name", "project")) if inputs.folders else ""
    words = spec.requirements if spec.project is None else ("project " + project, *spec.extras, *spec.groups)
    recipe = Recipe(
        fingerprint=fingerprint,
        folder=str(place.parent.parent / f"{name or project or 'venv'}-{fingerprint[:12]}"),
        shared=is_shared(),
        platform=this_platform(),
        python=spec.python or this_python(),
        implementation=sys.implementation.name,
        system_site_packages=spec.system_site_packages,
        pylock=pylock,
        own=tuple(own),
        links=tuple(spec.find_links),
        no_index=spec.no_index,
        env=inputs.env,
        setup=tuple(spec.setup),
        description=inputs.hide(", ".join(map(os.path.basename, words or ())))[:200],
        secrets=inputs.secrets,
    )
    settings = {"uv.toml": ""} if inputs.settings is None else {inputs.settings.name: str(inputs.settings)}
    return Plan(recipe, {**settings, **facts["paths"], **own})
