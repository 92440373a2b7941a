# SPDX-License-Identifier: Apache-2.0
"""From a spec to a recipe: uv exports what to install, once, and a note keeps the result for the same inputs."""

import gzip
import hashlib
import io
import json
import os
import re
import sys
import tarfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from ._node.build import PYLOCK, Recipe, this_platform, this_python
from ._node.store import FORMAT, build_folder, mark_used, publish, read_facts, write_facts
from ._node.uv import NOT_INHERITED, Deadline, Runner, is_secret_name, locate_uv, redact, replace_credentials
from ._spec import BaseSpec
from .exceptions import VenvBuildError

NOTE = ".note-"
NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"
# The driver's variables that say where distributions come from, and give access. Nodes need them to download.
INDEXES = re.compile(r"UV_(DEFAULT_INDEX|EXTRA_INDEX_URL|INDEX(_URL|_\w+_(USERNAME|PASSWORD))?)")
# The parts of an exported lock that describe this machine, and the packages of git, which stay as they are. The patch
# version of the driver's Python is no condition of the environment.
PATHS = re.compile(
    r"(?m)^(?P<git>vcs = .*)$|^(?P<unneeded>(?:requires-python = |index = \"(?:file:|/)).*\n)"
    r"|^directory = \{ path = \"(?P<folder>[^\"]*)\".*$"
    r"|\b(?:url = \"(?P<url>file:[^\"]*)\"|path = \"(?P<path>[^\"]*)\")"
)
# Folders that tools and this package write, which are never part of a distribution. Other hidden folders may be.
SKIPPED = re.compile(r"\.(git|hg|svn|hatch|hypothesis|locks|nox|note-.*|pixi|tox|venv)|__pycache__|.*\.egg-info")


@dataclass(frozen=True)
class Plan:
    """What an environment needs: the recipe, the lock, and the files of this machine that travel with it, by name."""

    recipe: Recipe
    pylock: str
    paths: Mapping[str, str]

    def read_files(self) -> dict[str, bytes]:
        """Read the files: the lock, wheels, source distributions, and uv's settings in the project."""
        try:
            read = {name: Path(path).read_bytes() if path else b"" for name, path in self.paths.items()}
        except OSError as error:  # another driver has replaced the note, or somebody a wheel
            raise VenvBuildError(f"{error}. It was there when the environment was planned. Try again.") from None
        return {PYLOCK: self.pylock.encode(), **read}


def venv_root() -> Path:
    """Return the folder of environments: `FAIRLEAD_VENV_DIR`, else one in the user's cache folder."""
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "fairlead", "venvs")
    return Path(os.path.abspath(os.path.expanduser(os.environ.get("FAIRLEAD_VENV_DIR") or default)))


def is_shared() -> bool:
    """Return whether the members of a group share the folder of environments."""
    return os.environ.get("FAIRLEAD_VENV_SHARED") == "1"


def plan_venv(spec: BaseSpec, name: str | None, deadline: Deadline, *, refresh: bool = False) -> Plan:
    """Decide the content of an environment. Without a note of the same inputs, or for `refresh`, uv resolves it."""
    if name is not None and (not isinstance(name, str) or not re.fullmatch(NAME, name) or ".." in name):
        raise ValueError(f"venv_name must be a plain word of at most 100 letters, digits, '_', '-', '.', got {name!r}")
    inputs = _Inputs(spec)
    place = venv_root() / f"{NOTE}{inputs.key}"

    def is_done() -> bool:
        return not refresh and _read_note(place) is not None

    facts = None if refresh else _read_note(place)
    if facts is None:
        with build_folder(place, is_done, deadline, shared=is_shared()) as aside:
            if aside is None:
                facts = _read_note(place)
            else:
                facts = _resolve(inputs, aside, Runner(deadline, inputs.env, no_index=spec.no_index))
                publish(aside / "new", place, is_done)
    if facts is None:
        raise VenvBuildError("The source of the project was changed meanwhile. Try again.")
    mark_used(place)
    return _make_plan(inputs, facts, place, name)


class _Inputs:
    """A spec with the settings of this process and the files that apply to it."""

    def __init__(self, spec: BaseSpec) -> None:
        self.spec = spec
        ambient = {name: value for name, value in os.environ.items() if INDEXES.fullmatch(name) and not spec.no_index}
        # Variables of uv and of the setup command on every node.
        self.env = {**ambient, **spec.env, **({} if spec.index is None else {"UV_DEFAULT_INDEX": spec.index})}
        if spec.find_links:
            self.env["UV_FIND_LINKS"] = ",".join(spec.find_links)
        folder = None if spec.project is None else Path(spec.project)
        files = [] if folder is None else [folder / "pyproject.toml", *_list_settings(folder)]
        # The file with uv's settings for the project, which decide how nodes build.
        texts = {str(path): path.read_text("utf-8") for path in files[1:3] if path.is_file()}
        self.settings = next((path for path in texts if path.endswith("uv.toml") or "[tool.uv" in texts[path]), "")
        # The words that a note has instead of the credentials in the URLs of requirements, which a lock repeats.
        words = self.words = dict[str, str]()
        wanted = " ".join(spec.requirements or ())
        wanted = replace_credentials(wanted, lambda text: words.setdefault(text, f"credential-{len(words)}"))
        # Facts that every fingerprint counts.
        self.counted = [
            *(FORMAT, spec.python or this_python(), sys.implementation.name, this_platform()),
            *(redact(str(spec.setup)), _hide(spec.env), redact(texts.get(self.settings, ""))),
            os.path.realpath(sys.executable) if spec.system_site_packages else "",
        ]
        uv = locate_uv()
        # uv itself links its program into each environment that has uv, which changes the time of change.
        seen = [(str(path), _see(path)) for path in files] + [(uv, _see(uv).rpartition(" ")[0])]
        names = [name for name in os.environ if name.startswith("UV_") and name not in NOT_INHERITED]
        variables = {**{name: os.environ[name] for name in names}, **self.env}
        facts = [self.counted, repr(spec), wanted, this_python(3), _hide(variables), seen]
        # A hash of everything that may change what uv resolves, without credentials.
        self.key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _hide(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables without credentials."""
    return {name: redact(value) for name, value in sorted(variables.items()) if not is_secret_name(name)}


def _list_settings(folder: Path) -> list[Path]:
    """Return the files beside the lock of a project, which is in its folder or above it, and the lock itself."""
    if not (folder / "pyproject.toml").is_file():
        raise ValueError(f"there is no pyproject.toml in {folder}")
    for root in (folder, *folder.parents):
        if (root / "uv.lock").is_file():
            return [root / "uv.toml", root / "pyproject.toml", root / "uv.lock"]
    raise ValueError(f"there is no uv.lock in {folder}, nor above it: run `uv lock` there")


def _read_note(place: Path) -> dict[str, Any] | None:
    """Return the note in a folder; None if there is none, it is damaged, or a file has changed since."""
    facts = read_facts(place)
    try:
        same = all(_see(place / path) == seen for path, seen in facts["paths"].values())
        same = same and all(_hash(_scan(path), members) == state for path, members, state in facts["sources"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return facts if same and isinstance(facts.get("pylock"), str) else None


def _resolve(inputs: _Inputs, aside: Path, runner: Runner) -> dict[str, Any]:
    """Let uv resolve a spec; write its answer as a note, and source distributions of folders, to `aside / "new"`."""
    new = aside / "new"
    new.mkdir()
    paths: dict[str, tuple[str, str]] = {}
    sources: list[tuple[str, list[str], str]] = []

    def move(match: re.Match[str]) -> str:
        """Return a part of the lock without paths of this machine."""
        if match["git"] or match["unneeded"]:
            return match["git"] or ""
        place = url2pathname(urlsplit(match["url"]).path) if match["url"] else match["folder"] or match["path"]
        path, number = Path(os.path.normpath(aside / place)), len(paths)
        if not match["folder"]:
            name = f"files/{number}/{path.name}"
            paths[name] = (str(path), _see(path))
            return f'path = "{name}"'
        sdist, members, state = _pack(path, aside / str(number), runner)
        sources.append((str(path), members, state))
        name = f"files/{number}/{sdist.name}"
        digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
        # A plan whose note is replaced must not read another content from the same path.
        stored = sdist.rename(new / f"{number}-{digest}.tar.gz")
        paths[name] = (stored.name, _see(stored))
        return f'archive = {{ path = "{name}", hashes = {{ sha256 = "{digest}" }} }}'

    # uv may encode other characters of a credential than the requirement does.
    words = {unquote(text): word for text, word in inputs.words.items()}
    pylock = PATHS.sub(move, _export(inputs, aside, runner))
    pylock = replace_credentials(pylock, lambda text: words.get(unquote(text), text))
    facts = {"pylock": pylock, "paths": paths, "sources": sources}
    write_facts(new, facts)
    return facts


def _export(inputs: _Inputs, stage: Path, runner: Runner) -> str:
    """Let uv resolve requirements, or export the lock of a project, which it checks unless the spec is frozen."""
    spec, failed = inputs.spec, "uv could not export the lock of the project"
    command = [
        *("export", "--frozen" if spec.frozen else "--locked", "--no-editable"),
        *(word for extra in spec.extras for word in ("--extra", extra)),
        *(word for group in spec.groups for word in ("--group", group)),
        *([] if spec.default_groups else ["--no-default-groups"]),
        *([] if spec.install_project else ["--no-emit-project"]),
    ]
    if spec.project is None:
        failed = "uv could not resolve the requirements"
        # This machine need not have an interpreter of the requested version.
        command = ["pip", "compile", "requirements.txt", *(["--python-version", spec.python] if spec.python else [])]
        (stage / "requirements.txt").write_text("\n".join(spec.requirements or ()) + "\n", encoding="utf-8")
        (stage / "uv.toml").touch()  # An empty one ends the search for settings in the folders above.
    # Without --python, uv would take the interpreter of an environment beside the project.
    command += ["--python", sys.executable, "--no-header", "--format", PYLOCK, "--output-file", str(stage / PYLOCK)]
    runner.uv(*command, cwd=stage if spec.project is None else Path(spec.project), failed=failed)
    return (stage / PYLOCK).read_text(encoding="utf-8")


def _pack(folder: Path, out: Path, runner: Runner) -> tuple[Path, list[str], str]:
    """Build a source distribution; return it, its files, and the folder's state. Equal files give equal bytes."""
    before = _scan(folder)
    runner.uv(
        *("build", "--sdist", "--python", sys.executable, "--out-dir", str(out), str(folder)),
        cwd=folder,
        failed=f"uv could not build the source distribution of {folder}",
    )
    (sdist,) = out.glob("*.tar.gz")
    content, names = io.BytesIO(), set()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=content, mode="w") as new:
        for member in sorted(old, key=lambda member: member.name):
            if (file := old.extractfile(member)) is not None:
                data = file.read()
                plain = tarfile.TarInfo(member.name)  # without times and owners
                plain.size, plain.mode = len(data), 0o755 if member.mode & 0o100 else 0o644
                new.addfile(plain, io.BytesIO(data))
                names.add(member.name.partition("/")[2])
    sdist.write_bytes(gzip.compress(content.getvalue(), mtime=0))
    members = sorted(names & before.keys())
    return sdist, members, _hash(before, members)


def _scan(folder: str | Path) -> dict[str, str]:
    """Return the size and times of all files below a folder."""
    files: dict[str, str] = {}
    for base, folders, names in os.walk(folder):
        if base != str(folder) and not {"pyvenv.cfg", "CACHEDIR.TAG"}.isdisjoint(names):  # an environment, or a cache
            folders.clear()
            continue
        folders[:] = [name for name in folders if not SKIPPED.fullmatch(name)]
        files |= {os.path.relpath(path, folder): _see(path) for path in (os.path.join(base, name) for name in names)}
    return files


def _hash(files: Mapping[str, str], members: Collection[str]) -> str:
    """Return a hash of the files in the last source distribution, and of the names of all others."""
    inside = frozenset(members)
    lines = [f"{name}\0{seen if name in inside else ''}\n" for name, seen in sorted(files.items())]
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()


def _see(path: str | Path) -> str:
    """Return the size and times of a file; empty if it is missing. No program can set the time of change back."""
    try:
        seen = os.stat(path)
    except OSError:
        return ""
    return f"{seen.st_size} {seen.st_mtime_ns} {seen.st_ctime_ns}"


def _make_plan(inputs: _Inputs, facts: Mapping[str, Any], place: Path, name: str | None) -> Plan:
    """Combine a spec and its note to a plan. Starts no process."""
    spec, pylock = inputs.spec, facts["pylock"]
    fingerprint = hashlib.sha256(json.dumps([*inputs.counted, pylock]).encode()).hexdigest()
    credentials = {word: text for text, word in inputs.words.items()}
    pylock = replace_credentials(pylock, lambda word: credentials.get(word, word)) if credentials else pylock
    words = (f"project {Path(str(spec.project)).name}", *spec.extras, *spec.groups)
    recipe = Recipe(
        fingerprint=fingerprint,
        folder=str(place.with_name(f"{name or 'venv'}-{fingerprint[:12]}")),
        shared=is_shared(),
        platform=this_platform(),
        python=spec.python or this_python(),
        system_site_packages=spec.system_site_packages,
        no_index=spec.no_index,
        env=inputs.env,
        setup=tuple(spec.setup),
        description=redact(", ".join(words if spec.requirements is None else spec.requirements))[:200],
    )
    paths = {name: str(place / path) for name, (path, _) in facts["paths"].items()}
    return Plan(recipe, pylock, {os.path.basename(inputs.settings) or "uv.toml": inputs.settings, **paths})


class VenvSpec(BaseSpec):
    """The content of an environment. Specs with the same content have the same fingerprint and share one environment.

    Exactly one of `requirements`, `project` and `command` is given.

    Args:
        requirements: as for pip: "numpy>=2", or "pkg @ https://...", also a wheel or a folder of this machine by
            "pkg @ file:///...". May be empty.
        project: folder with a pyproject.toml. Its uv.lock is beside it, or in the workspace that it is part of. Nothing
            is installed editable: its code, and that of local folders, travels as source distributions.
        extras: extras of the project to install. Their order does not matter.
        groups: dependency groups of the project to install.
        default_groups: whether to install also the groups that uv installs by default (usually `dev`).
        install_project: whether to install the project's own code.
        frozen: do not check that the lock matches the pyproject.
        command: "uv run --locked --extra vllm --directory X", read as a project with its extras, groups and default
            groups; or "uv run --no-project --with numpy", read as requirements.
        python: version, "3.11" or "3.11.7"; by default major and minor version of this Python.
        env: variables for uv and `setup`, such as UV_INDEX or UV_TORCH_BACKEND, on every node. Secrets of `setup`
            belong here: they are never shown or written, and do not count.
        find_links: folders or URLs with distributions. Those that are chosen are sent to the nodes.
        index: URL of the package index, instead of the one that uv is configured to use.
        no_index: use no index at all.
        setup: a command, as a list, that runs in the new environment at the end. It is shown in errors.
        system_site_packages: make the packages of the base interpreter visible. Their content does not count.

    Raises:
        ValueError: the arguments contradict each other, or do not describe an environment.
        TypeError: a string where a sequence of strings is needed.

    >>> spec = VenvSpec(requirements=["NumPy >= 2", "ray"])
    >>> spec.requirements
    ('numpy>=2', 'ray')
    >>> spec == VenvSpec(requirements=("ray", "numpy>=2"))
    True
    """

    def fingerprint(self) -> str:
        """Return a hash of everything that decides the content, as 64 hexadecimal digits.

        Requirements that were never resolved are resolved first.

        Raises:
            ValueError: there is no project or lock.
            VenvBuildError: nothing satisfies the requirements, or the lock does not match its pyproject.
        """
        return plan_venv(self, None, Deadline(1800.0)).recipe.fingerprint


def as_spec(py_executable: Any) -> VenvSpec:
    """Return a spec that is given as itself or as a command."""
    if isinstance(py_executable, VenvSpec):
        return py_executable
    if not isinstance(py_executable, str):
        raise TypeError(f"expected a VenvSpec or a command 'uv run ...', got {type(py_executable).__name__}")
    return VenvSpec(command=py_executable)
