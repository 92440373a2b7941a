# SPDX-License-Identifier: Apache-2.0
"""Environments on this machine: built once, complete or not there, never editable, never stale."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fairlead_venvs import VenvBuildError, VenvSpec, create_local_venv
from fairlead_venvs._node.store import MANIFEST


@pytest.mark.smoke
def test_requirements(spec_of, tools, root):
    """An environment has the requested packages, and its scripts and VIRTUAL_ENV work in its final place."""
    python = create_local_venv(spec_of("beta", "alpha<2"))
    folder = Path(python).parent.parent

    assert folder.parent == root
    assert tools.says(python, "import alpha, beta; print(alpha.version, beta.version)") == "1.0 1.0"
    said = subprocess.run([folder / "bin" / "alpha-says"], capture_output=True, text=True, timeout=60).stdout
    assert said.split() == ["1.0", str(folder)]
    shell = f'. "{folder}/bin/activate" && alpha-says && echo "$VIRTUAL_ENV"'
    said = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60).stdout
    assert said.split() == ["1.0", str(folder), str(folder)]


@pytest.mark.smoke
def test_warm(spec_of, make_project, project_spec):
    """An existing environment is found without starting a process, also that of a project."""
    started = []
    sys.addaudithook(lambda event, args: started.append(args) if event in ("subprocess.Popen", "os.fork") else None)
    specs = [spec_of("alpha"), project_spec(make_project())]
    paths = [create_local_venv(spec) for spec in specs]
    assert started
    started.clear()

    assert [create_local_venv(spec) for spec in specs] == paths
    assert started == []


def test_file_urls(make_project, tools, tmp_path, wheels):
    """A wheel or a folder can be given by its URL; another content in the same place is another environment."""
    wheel, folder = tools.make_wheel(tmp_path, "delta"), make_project(lock=False)
    spec = VenvSpec(
        requirements=[f"delta @ {wheel.as_uri()}", f"proj @ {folder.as_uri()}"], find_links=[str(wheels)], no_index=True
    )
    first = create_local_venv(spec)
    tools.make_wheel(tmp_path, "delta", files={"delta.py": "version = 'changed'"})
    second = create_local_venv(spec)

    code = "import alpha, delta, proj; print(alpha.version, delta.version, proj.answer)"
    assert [tools.says(python, code) for python in (first, second)] == ["1.0 1.0 42", "1.0 changed 42"]


def test_project(make_project, project_spec, tools, wheels):
    """A project is installed as its lock says, its own code as a wheel: it works after its source is gone."""
    folder = make_project(more='[project.optional-dependencies]\nx = ["gamma"]\n[dependency-groups]\ndev = ["beta"]\n')
    plain = create_local_venv(project_spec(folder))
    full = create_local_venv(project_spec(folder, extras=["x"], groups=["dev"]))
    bare = create_local_venv(project_spec(folder, install_project=False))
    with_dev = create_local_venv(
        VenvSpec(command=f"uv run --locked --directory {folder}", find_links=[str(wheels)], no_index=True)
    )
    shutil.rmtree(folder)

    there = "import importlib.util as u; print(*(n for n in 'proj alpha beta gamma'.split() if u.find_spec(n)))"
    assert tools.says(plain, there) == "proj alpha"
    assert tools.says(full, there) == "proj alpha beta gamma"
    assert tools.says(bare, there) == "alpha"
    assert tools.says(with_dev, there) == "proj alpha beta"
    assert tools.says(plain, "import alpha, proj; print(alpha.version, proj.answer)") == "1.0 42"
    assert list(Path(plain).parent.parent.glob("lib/*/site-packages/__editable__*")) == []


def test_variables_of_the_caller(make_project, project_spec, tools, monkeypatch):
    """Variables of the caller's shell about another project do not change the content."""
    folder = make_project(more='[dependency-groups]\ndev = ["beta"]\n')
    for name in ("UV_NO_DEV", "UV_NO_DEFAULT_GROUPS", "UV_NO_INSTALL_PROJECT", "UV_NO_SYNC", "UV_LOCKED"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("UV_PROJECT_ENVIRONMENT", str(folder / "elsewhere"))
    monkeypatch.setenv("VIRTUAL_ENV", "/nowhere")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    python = create_local_venv(project_spec(folder, groups=["dev"]))
    assert tools.says(python, "import alpha, beta, proj; print('all')") == "all"


def test_changed_source(make_project, project_spec, tools):
    """A changed line of the project's code is another environment; the same line again is the old one."""
    folder = make_project()
    module = folder / "src" / "proj" / "__init__.py"
    first = create_local_venv(project_spec(folder))
    stamp = module.stat()
    module.write_text("answer = 43\n")
    # A check of size and time alone would miss the edit.
    os.utime(module, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    second = create_local_venv(project_spec(folder))
    module.write_text("answer = 42\n")

    assert [tools.says(one, "import proj; print(proj.answer)") for one in (first, second)] == ["42", "43"]
    assert create_local_venv(project_spec(folder)) == first


def test_local_folders(make_project, project_spec, tools, tmp_path, wheels):
    """Workspace members and path dependencies are installed as wheels; a member can be given by its own folder."""
    make_project("other", folder=tmp_path / "other", dependencies=["gamma"], lock=False)
    make_project("member", folder=tmp_path / "proj" / "member", lock=False)
    folder = make_project(
        dependencies=["member", "other"],
        more="""
        [tool.uv.sources]
        member = { workspace = true }
        other = { path = "../other", editable = true }
        [tool.uv.workspace]
        members = ["member"]
        """,
    )
    whole = create_local_venv(project_spec(folder))
    member = create_local_venv(project_spec(folder / "member"))
    (tmp_path / "other" / "src" / "other" / "__init__.py").write_text("answer = 43\n")
    changed = create_local_venv(project_spec(folder))
    shutil.rmtree(folder)
    shutil.rmtree(tmp_path / "other")

    there = "import importlib.util as u; print(*(n for n in 'proj member other alpha gamma'.split() if u.find_spec(n)))"
    assert tools.says(whole, there) == "proj member other alpha gamma"
    assert tools.says(member, there) == "member alpha"
    assert changed != whole
    assert tools.says(changed, "import other; print(other.answer)") == "43"


@pytest.mark.smoke
def test_setup(spec_of, tools):
    """The setup command runs inside, with what is installed; if it fails there is no environment."""
    write = "import sys, alpha, pathlib; pathlib.Path(sys.prefix, 'seen').write_text(alpha.version)"
    python = create_local_venv(spec_of("alpha==2.0", setup=["python", "-c", write]))
    assert (Path(python).parent.parent / "seen").read_text() == "2.0"

    with pytest.raises(VenvBuildError, match="setup command failed") as caught:
        create_local_venv(spec_of("alpha==2.0", setup=["python", "-c", "import sys; sys.exit('no luck')"]))
    assert caught.value.output == ("no luck",)


def test_system_site_packages(tools):
    """With `system_site_packages`, the packages of the base interpreter are visible."""
    seen = create_local_venv(VenvSpec(requirements=[], system_site_packages=True))
    alone = create_local_venv(VenvSpec(requirements=[]))
    base = tools.says(sys.executable, "import sys; print(sys.base_prefix)")
    code = f"import sys; print(any(p.startswith({base!r}) and 'packages' in p for p in sys.path))"
    assert [tools.says(python, code) for python in (seen, alone)] == ["True", "False"]


def test_names(spec_of):
    """A name is part of the folder's name, and must be a plain word."""
    python = create_local_venv(spec_of("alpha"), "trainer")
    assert Path(python).parent.parent.name.startswith("trainer-")
    for name in ("../up", "/absolute", "a/b", "", "..", "-dash", "a..b", "with space", ".hidden", "x" * 101, "a\n"):
        with pytest.raises(ValueError, match="plain word"):
            create_local_venv(spec_of("alpha"), name)


@pytest.mark.parametrize("damage", ["empty", "garbage", "other", "deep", "gone", "python"])
def test_damaged(spec_of, tools, damage):
    """An incomplete environment is not reported as ready, but built again in the same place."""
    spec = spec_of("alpha")
    python = create_local_venv(spec)
    manifest = Path(python).parent.parent / MANIFEST
    if damage == "python":
        os.unlink(python)
        os.symlink("/nonexistent/python", python)
    elif damage == "gone":
        manifest.unlink()
    else:
        other = json.dumps({**json.loads(manifest.read_text()), "fingerprint": "0" * 64})
        manifest.write_text({"empty": "", "garbage": "{", "other": other, "deep": "[" * 100_000}[damage])

    assert create_local_venv(spec) == python
    assert tools.says(python, "import alpha; print(alpha.version)") == "2.0"
    assert json.loads(manifest.read_text())["fingerprint"] == spec.fingerprint()


def test_force_rebuild(spec_of, tools):
    """A rebuild takes the place in one step. A process that runs from the old one continues and can import more."""
    spec = spec_of("alpha", "beta")
    python = create_local_venv(spec)
    folder = Path(python).parent.parent
    (folder / "mark").touch()
    code = "import alpha; print('up', flush=True); input(); import beta; print(beta.version)"
    with subprocess.Popen([python, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout.readline() == "up\n"
        assert create_local_venv(spec, force_rebuild=True) == python
        out, _ = running.communicate("\n", timeout=60)

    assert out == "1.0\n"
    assert running.returncode == 0
    assert not (folder / "mark").exists()
