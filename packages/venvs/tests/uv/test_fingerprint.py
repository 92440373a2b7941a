# SPDX-License-Identifier: Apache-2.0
"""The facts of a project that change the fingerprint, and those that do not."""

import os
import sys

import pytest

from fairlead_venvs import create_local_venv
from fairlead_venvs._planning.wheel import hash_source

# Another version than that of the tests.
OTHER_PYTHON = "3.12" if sys.version_info[:2] != (3, 12) else "3.13"


MORE = '[project.optional-dependencies]\nx = ["gamma"]\ny = ["beta"]\n[dependency-groups]\ndev = ["beta"]\n'


@pytest.fixture
def folder(make_project):
    return make_project(more=MORE)


def test_lock(folder, project_spec):
    """One byte of the lock changes the fingerprint."""
    first = project_spec(folder).fingerprint()
    lock = folder / "uv.lock"
    lock.write_bytes(lock.read_bytes() + b"\n")
    assert project_spec(folder).fingerprint() != first


def test_pyproject(folder, project_spec):
    """Comments, layout and settings of other tools in the pyproject do not count; dependencies do."""
    first = project_spec(folder).fingerprint()
    pyproject = folder / "pyproject.toml"
    text = pyproject.read_text()
    # With the same wheel: the backend of the tests reads nothing else.
    pyproject.write_text(f"# a comment\n{text}\n\n[tool.other]\nx = 1 # more\n[tool.fairlead.actor-environments]\n")
    assert project_spec(folder).fingerprint() == first
    for more in ('[tool.uv]\nno-build-isolation-package = ["a"]\n', '[tool.uv]\ndev-dependencies = ["gamma"]\n'):
        pyproject.write_text(text + more)
        assert project_spec(folder).fingerprint() != first
    pyproject.write_text(text)
    (folder / "uv.toml").write_text("no-cache = true\n")
    assert project_spec(folder).fingerprint() != first


def test_data_of_a_package(folder):
    """An edit is detected in every folder of any name that a wheel may contain."""
    data = folder / "src" / "proj" / "node_modules" / "t.txt"
    data.parent.mkdir()
    data.write_text("one")
    first = hash_source(folder)
    data.write_text("other")
    assert hash_source(folder) != first
    # What tools keep beside the pyproject is not the project's.
    (folder / "node_modules").mkdir()
    before = hash_source(folder)
    (folder / "node_modules" / "t.txt").touch()
    assert hash_source(folder) == before


def test_folder_that_is_being_removed(folder, monkeypatch):
    """A folder that another program removes while the source is read is not an error; the project's own is."""
    (folder / "outputs").mkdir()
    before, scan = hash_source(folder), os.scandir

    def remove_first(path):
        if path == str(folder / "outputs"):
            os.rmdir(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", remove_first)
    assert hash_source(folder) == before
    with pytest.raises(FileNotFoundError):
        hash_source(folder / "outputs")


def test_project_in_an_environment(folder):
    """An edit is detected in a project whose folder is an environment, too; environments below it do not count."""
    (folder / "pyvenv.cfg").touch()
    (folder / "below").mkdir()
    (folder / "below" / "pyvenv.cfg").touch()
    first = hash_source(folder)
    (folder / "below" / "module.py").touch()
    assert hash_source(folder) == first
    (folder / "src" / "proj" / "__init__.py").write_text("answer = 43\n")
    assert hash_source(folder) != first


def test_fields_of_projects(folder, project_spec):
    """Extras, groups, own code, Python, setup and settings each give another fingerprint."""
    specs = [
        project_spec(folder),
        project_spec(folder, extras=["x"]),
        project_spec(folder, extras=["x", "y"]),
        project_spec(folder, groups=["dev"]),
        project_spec(folder, install_project=False),
        project_spec(folder, install_project=False, python=OTHER_PYTHON),
        project_spec(folder, setup=["true"]),
        project_spec(folder, setup=["true", "1"]),
        project_spec(folder, env={"UV_TORCH_BACKEND": "cpu"}),
        project_spec(folder, system_site_packages=True),
        project_spec(folder, frozen=True),
    ]
    assert len({spec.fingerprint() for spec in specs}) == len(specs)
    assert (
        project_spec(folder, extras=["y", "x"]).fingerprint() == project_spec(folder, extras=["x", "y"]).fingerprint()
    )
    with_default = project_spec(folder, default_groups=True)
    assert with_default.fingerprint() == project_spec(folder, groups=["dev"]).fingerprint()
    assert with_default.fingerprint() != project_spec(folder, default_groups=True, no_groups=["dev"]).fingerprint()


def test_name(folder, project_spec):
    """The name of an environment changes neither its content nor the fingerprint in its folder's name."""
    fingerprint = project_spec(folder).fingerprint()
    for name in ("one", "two"):
        assert f"/{name}-{fingerprint[:12]}/bin/python" in create_local_venv(project_spec(folder), name)
    assert f"/proj-{fingerprint[:12]}/bin/python" in create_local_venv(project_spec(folder))


def test_packing(make_project, project_spec):
    """When and in what order the files of a wheel are packed does not count."""
    folder = make_project()
    first = project_spec(folder).fingerprint()
    backend = folder / "backend.py"
    backend.write_text(
        backend.read_text().replace('sorted(pathlib.Path("src")', 'sorted(pathlib.Path("src")') + "\n# again\n"
    )
    module = folder / "src" / "proj" / "__init__.py"
    module.write_text(module.read_text())
    assert project_spec(folder).fingerprint() == first
