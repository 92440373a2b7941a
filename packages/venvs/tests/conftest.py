# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests: small wheels and projects, so that no index is needed, and a folder for each test."""

import contextlib
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from uv import find_uv_bin

from fairlead_venvs import VenvSpec

# A build backend in the project's own folder: `uv build` needs nothing from anywhere.
BACKEND = """
import pathlib, tarfile, tomllib, zipfile

def _stem():
    project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
    return f"{project['name'].replace('-', '_')}-{project['version']}"

def build_wheel(folder, config_settings=None, metadata_directory=None):
    stem = _stem()
    with zipfile.ZipFile(pathlib.Path(folder, f"{stem}-py3-none-any.whl"), "w") as wheel:
        for path in sorted(pathlib.Path("src").rglob("*.py")):
            wheel.write(path, path.relative_to("src"))
        name, version = stem.split("-")
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return f"{stem}-py3-none-any.whl"

def build_sdist(folder, config_settings=None):
    with tarfile.open(pathlib.Path(folder, f"{_stem()}.tar.gz"), "w:gz") as sdist:
        for path in [pathlib.Path("pyproject.toml"), pathlib.Path("backend.py"), *pathlib.Path("src").rglob("*.py")]:
            sdist.add(path, f"{_stem()}/{path}")
    return f"{_stem()}.tar.gz"
"""


def make_wheel(folder, name, version="1.0", *, files=None, requires=(), scripts=None, module=True):
    """Write a wheel with a module that knows its version, further files, and console scripts."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    code = f"version = {version!r}\n\n\ndef main():\n    import sys\n    print(version, sys.prefix)\n"
    content = {
        **({f"{name}.py": code} if module else {}),
        **(files or {}),
        f"{info}/METADATA": metadata + "".join(f"Requires-Dist: {one}\n" for one in requires),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    if scripts:
        lines = [f"{name} = {function}\n" for name, function in scripts.items()]
        content[f"{info}/entry_points.txt"] = "[console_scripts]\n" + "".join(lines)
    made = Path(folder, f"{name}-{version}-py3-none-any.whl")
    with zipfile.ZipFile(made, "w") as wheel:
        for path, text in content.items():
            wheel.writestr(path, text)
    return made


def ray_wheel(folder, version):
    """Write a wheel with the metadata of a version of Ray, and with the content of the Ray of these tests."""
    site = next(path for path in sys.path if Path(path, "ray", "__init__.py").is_file())
    return make_wheel(folder, "ray", version, files={"ray_of_the_tests.pth": f"{site}\n"}, module=False)


@pytest.fixture(scope="session", autouse=True)
def uv_cache(tmp_path_factory):
    """Use an empty cache of uv for the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UV_CACHE_DIR", str(tmp_path_factory.mktemp("uv-cache")))
        yield


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """A folder of wheels: `alpha` with a script, in two versions; `beta`, which needs it; `gamma`."""
    folder = tmp_path_factory.mktemp("wheels")
    for version in ("1.0", "2.0"):
        make_wheel(folder, "alpha", version, scripts={"alpha-says": "alpha:main"})
    make_wheel(folder, "beta", requires=["alpha"])
    make_wheel(folder, "gamma")
    return folder


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """The folder of environments of this test."""
    folder = tmp_path / "venvs"
    monkeypatch.setenv("FAIRLEAD_VENV_DIR", str(folder))
    monkeypatch.delenv("FAIRLEAD_VENV_UV", raising=False)
    return folder


@pytest.fixture(autouse=True)
def no_leaks(root):
    """Check that no build leaves anything. It replaces the fixture of all packages, which needs fairlead-placement."""
    yield
    assert [path.name for path in root.glob("*.aside-*")] == []


@pytest.fixture
def spec_of(wheels):
    """A spec of requirements that are found among the wheels."""

    def spec(*requirements, **options):
        return VenvSpec(requirements=requirements, **{"find_links": [str(wheels)], "no_index": True, **options})

    return spec


@pytest.fixture
def make_project(tmp_path, wheels):
    """Write a project with a lock, and return its folder."""

    def make(name="proj", *, folder=None, dependencies=("alpha==1.0",), more="", lock=True, root=True):
        folder = Path(folder or tmp_path / name)
        (folder / "src" / name).mkdir(parents=True)
        (folder / "src" / name / "__init__.py").write_text("answer = 42\n")
        (folder / "backend.py").write_text(BACKEND)
        (folder / "pyproject.toml").write_text(
            f'[project]\nname = "{name}"\nversion = "0.1"\nrequires-python = ">=3.11"\n'
            f"dependencies = {list(dependencies)}\n"
            f'[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n{textwrap.dedent(more)}'
        )
        if lock:
            lock_project(folder, wheels)
        return folder

    return make


@pytest.fixture
def project_spec(wheels):
    """A spec of a project whose dependencies are found among the wheels."""
    return lambda folder, **options: VenvSpec(
        **{"project": folder, "find_links": [str(wheels)], "no_index": True, **options}
    )


def lock_project(folder, wheels):
    """Run `uv lock` without an index."""
    env = {**os.environ, "UV_FIND_LINKS": str(wheels)}
    command = [find_uv_bin(), "lock", "--no-index", "--python", sys.executable]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def says(python, code):
    """Return the output of a piece of code in an environment."""
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def running(words):
    """Return the ids of the processes whose command line has these words, joined by zeros."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += [path.parent.name] if words in path.read_text(errors="replace") else []
    return found


@pytest.fixture
def run(tmp_path):
    """Run the command line with some arguments, and return its output."""

    def call(*arguments, code=0):
        command = [sys.executable, "-m", "fairlead_venvs", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stdout + done.stderr

    return call


@pytest.fixture(scope="session")
def tools():
    """The functions of this file, for tests."""
    return sys.modules[__name__]
