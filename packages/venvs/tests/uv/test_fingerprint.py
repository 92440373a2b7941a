# SPDX-License-Identifier: Apache-2.0
"""What changes the fingerprint of an environment, what does not, and how long a resolution is kept."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fairlead_venvs import VenvSpec, create_local_venv

# Another version than that of the tests.
OTHER_PYTHON = "3.12" if sys.version_info[:2] != (3, 12) else "3.13"
MORE = '[project.optional-dependencies]\nx = ["gamma"]\ny = ["beta"]\n[dependency-groups]\ndev = ["beta"]\n'
VERSION = "import alpha; print(alpha.version)"


@pytest.fixture
def folder(make_project):
    return make_project(more=MORE)


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """The arguments of every call of uv, recorded by a program that then calls uv."""
    note, program = tmp_path / "calls", tmp_path / "bin" / "uv"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$*" >> {note}\nexec {shutil.which("uv")} "$@"\n')
    program.chmod(0o755)
    note.touch()
    monkeypatch.setenv("FAIRLEAD_VENV_UV", str(program))
    return lambda: [line for line in note.read_text().splitlines() if line != "--version"]


def test_requirements(spec_of, wheels, tools, tmp_path):
    """Specs that resolve to the same files share an environment; files, settings, Python and setup make another one."""
    first = spec_of("alpha").fingerprint()
    copy = tmp_path / "copy"
    shutil.copytree(wheels, copy)
    same = [
        spec_of("Alpha == 2.0"),
        spec_of("alpha>1", "alpha"),
        spec_of("alpha", env={"UV_INDEX_X_PASSWORD": "x", "HF_TOKEN": "y"}),
        spec_of("alpha", find_links=[str(copy)]),
    ]
    assert {spec.fingerprint() for spec in same} == {first}
    (copy / "alpha-2.0-py3-none-any.whl").unlink()
    tools.make_wheel(copy, "alpha", "2.0", files={"more.py": ""})
    others = [
        spec_of(),
        spec_of("alpha==1.0"),
        spec_of("alpha", "gamma"),
        spec_of("alpha", python=OTHER_PYTHON),
        spec_of("alpha", setup=["true"]),
        spec_of("alpha", setup=["true", "1"]),
        spec_of("alpha", env={"UV_TORCH_BACKEND": "cpu"}),
        spec_of("alpha", system_site_packages=True),
        spec_of("alpha", find_links=[str(copy)]),
    ]
    assert len({first, *(spec.fingerprint() for spec in others)}) == len(others) + 1


def test_settings_of_the_project(folder, project_spec):
    """uv's settings in a project count, as they decide how nodes build."""
    spec = project_spec(folder, install_project=False)
    first = spec.fingerprint()
    pyproject = folder / "pyproject.toml"
    pyproject.write_text(pyproject.read_text() + '[tool.uv]\nno-build-isolation-package = ["a"]\n')
    second = spec.fingerprint()
    (folder / "uv.toml").write_text("no-cache = true\n")
    assert len({first, second, spec.fingerprint()}) == 3


def test_files_that_are_no_source(folder, project_spec, calls):
    """A log file below the project changes no fingerprint and builds no environment; code that appears is seen."""
    spec = project_spec(folder)
    python = create_local_venv(spec)
    before = len(calls())
    (folder / "outputs").mkdir()
    (folder / "outputs" / "run.log").write_text("step 1\n")
    (folder / "train.log").write_text("step 1\n")
    assert create_local_venv(spec) == python
    # The new names may belong to the source: its distribution is built again, and is the same.
    assert [call.split()[0] for call in calls()[before:]] == ["export", "build"]
    before = len(calls())
    for log in (folder / "train.log", folder / "outputs" / "run.log"):
        log.write_text("step 2\n")
    assert create_local_venv(spec) == python
    assert calls()[before:] == []
    hidden = folder / "src" / "proj" / ".templates"
    hidden.mkdir()
    seen = {python}
    for file in (folder / "src" / "proj" / "more.py", hidden / "more.py"):
        for text in ("more = 1\n", "more = 2.0\n"):
            file.write_text(text)
            seen.add(create_local_venv(spec))
    assert len(seen) == 5


def test_edited_while_it_is_built(folder, project_spec, tools):
    """A source that is edited while its distribution is built is not taken for the one before."""
    module, backend = folder / "src" / "proj" / "__init__.py", folder / "backend.py"
    text = backend.read_text()
    edit = "\npathlib.Path('src/proj/__init__.py').write_text('answer = 43\\n')\n"
    backend.write_text(text + edit)
    create_local_venv(project_spec(folder))
    module.write_text("answer = 42\n")
    backend.write_text(text)
    assert tools.says(create_local_venv(project_spec(folder)), "import proj; print(proj.answer)") == "42"


def test_resolved_once(wheels, tools, calls, tmp_path):
    """A later build gets the versions of the first one, until they are resolved again."""
    links = tmp_path / "links"
    links.mkdir()
    shutil.copy(wheels / "alpha-1.0-py3-none-any.whl", links)
    spec = VenvSpec(requirements=["alpha"], no_index=True, env={"UV_FIND_LINKS": str(links)})
    first = create_local_venv(spec)
    tools.make_wheel(links, "alpha", "2.0")
    shutil.rmtree(Path(first).parent.parent)
    assert create_local_venv(spec) == first
    assert sum("pip compile" in call for call in calls()) == 1
    second = create_local_venv(spec, force_rebuild=True)
    assert [tools.says(python, VERSION) for python in (first, second)] == ["1.0", "2.0"]
    assert create_local_venv(spec) == second


def test_settings_of_the_driver(wheels, tools, monkeypatch):
    """Variables of the driver that uv reads decide the resolution."""
    spec = VenvSpec(requirements=["alpha"], no_index=True)
    monkeypatch.setenv("UV_FIND_LINKS", str(wheels))
    assert tools.says(create_local_venv(spec), VERSION) == "2.0"
    monkeypatch.setenv("UV_RESOLUTION", "lowest")
    assert tools.says(create_local_venv(spec), VERSION) == "1.0"


def test_another_python(wheels, tools, root):
    """Versions are those for the environment's Python, which need not be on the driver."""
    wanted = [f"alpha==1.0; python_version=='{OTHER_PYTHON}'", f"alpha==2.0; python_version!='{OTHER_PYTHON}'"]
    env = {"UV_FIND_LINKS": str(wheels)}
    specs = [VenvSpec(requirements=wanted, no_index=True, env=env, python=python) for python in (None, OTHER_PYTHON)]
    assert tools.says(create_local_venv(specs[0]), VERSION) == "2.0"
    shutil.rmtree(root)
    specs[1].fingerprint()
    (note,) = root.glob(".note-*/.fairlead-complete.json")
    assert "alpha-1.0-py3" in note.read_text()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git(make_project, tools, wheels):
    """A branch means the commit that it named when it was resolved."""
    folder = make_project("delta", dependencies=["alpha"], lock=False)

    def commit(answer):
        (folder / "src" / "delta" / "__init__.py").write_text(f"answer = {answer}\n")
        who = ["-c", "user.name=x", "-c", "user.email=x@localhost"]
        for words in (["init", "-q", "-b", "main"], ["add", "."], [*who, "commit", "-qm", "x"]):
            subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)

    commit(1)
    wanted = [f"delta @ git+{folder.as_uri()}@main"]
    spec = VenvSpec(requirements=wanted, no_index=True, env={"UV_FIND_LINKS": str(wheels)})
    python = create_local_venv(spec)
    commit(2)
    shutil.rmtree(Path(python).parent.parent)
    assert create_local_venv(spec) == python
    assert tools.says(python, "import alpha, delta; print(delta.answer)") == "1"
    assert tools.says(create_local_venv(spec, force_rebuild=True), "import delta; print(delta.answer)") == "2"
