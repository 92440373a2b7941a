# SPDX-License-Identifier: Apache-2.0
"""Requirements are resolved once, and every machine installs the same versions."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from uv import find_uv_bin

from fairlead_venvs import VenvBuildError, VenvSpec, VenvTimeoutError, create_local_venv, prune
from fairlead_venvs._build.node_task import build_here
from fairlead_venvs._build.uv import Deadline, Session, is_deciding
from fairlead_venvs._planning.plan import plan_venv, read_draft
from fairlead_venvs._planning.requirements import RESOLVED, Resolution

VERSION = "import alpha; print(alpha.version)"


@pytest.fixture
def links(tools, tmp_path):
    """A folder that stands for an index, so its content does not count."""
    folder = tmp_path / "links"
    folder.mkdir()
    tools.make_wheel(folder, "alpha", "1.0")
    tools.make_wheel(folder, "beta", requires=["alpha"])
    return folder


@pytest.fixture
def spec(links):
    return VenvSpec(requirements=["beta"], no_index=True, env={"UV_FIND_LINKS": str(links)})


@pytest.fixture
def elsewhere(tmp_path):
    """Build a plan like a new node, and return its interpreter."""

    def build(plan, folder="node"):
        recipe = dataclasses.replace(plan.recipe, folder=str(tmp_path / folder / Path(plan.recipe.folder).name))
        files = [(name, one if isinstance(one, bytes) else one.read_bytes()) for name, one in plan.files]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ray.get", lambda shipped: shipped)  # seam: the object store
            answer = build_here(dataclasses.asdict(recipe), [files], 60.0)
        assert answer[0] == "ready", answer
        return answer[1]

    return build


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """The arguments of every call of uv, recorded by a program that then calls uv."""
    note = tmp_path / "calls"
    program = tmp_path / "bin" / "uv"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$*" >> {note}\nexec {find_uv_bin()} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("FAIRLEAD_VENV_UV", str(program))
    return lambda: [line for line in note.read_text().splitlines() if line != "--version"]


def test_once(spec, links, tools, elsewhere, calls, tmp_path):
    """A later build on any machine gets the versions of the first one, until they are resolved again."""
    first = create_local_venv(spec)
    tools.make_wheel(links, "alpha", "2.0")
    plan = plan_venv(spec)
    assert tools.says(elsewhere(plan), VERSION) == "1.0"
    assert create_local_venv(spec) == first == create_local_venv(VenvSpec(**fields(spec)))
    assert sum("pip compile" in call for call in calls()) == 1

    second = create_local_venv(spec, force_rebuild=True)
    assert second != first
    assert [tools.says(one, VERSION) for one in (first, second)] == ["1.0", "2.0"]
    assert create_local_venv(spec) == second
    assert create_local_venv(spec, force_rebuild=True) == second
    # The resolution of another driver is another environment.
    assert plan.recipe.fingerprint != plan_venv(spec).recipe.fingerprint


def fields(spec):
    return {one.name: getattr(spec, one.name) for one in dataclasses.fields(spec)}


def test_several_drivers(spec, root, calls):
    """Several drivers at once resolve once, and agree."""
    with ThreadPoolExecutor(4) as pool:
        prints = list(pool.map(lambda _: plan_venv(spec).recipe.fingerprint, range(4)))
    assert len(set(prints)) == 1
    assert len(calls()) == 1
    assert [path.name for path in (root / RESOLVED).glob("[!.]*")] == [read_draft(spec).recipe.request]


def test_drivers_without_locks(spec, links, tools, root, monkeypatch):
    """On a file system without locks, two drivers with different results both use the first one."""
    tools.make_wheel(links, "alpha", "2.0")
    read = plan_venv(spec).recipe
    stored = root / RESOLVED / read.request
    other = stored.read_text().replace("alpha==2.0", "alpha==1.0")
    looked = []

    def look(path, root):
        looked.append(path)
        if len(looked) == 3:  # after the last look before uv is asked
            path.write_text(other)
        return None if len(looked) < 4 else Resolution(("alpha==1.0", "beta==1.0"))

    stored.unlink()
    monkeypatch.setattr("fairlead_venvs._planning.requirements._read", look)
    assert plan_venv(spec).recipe.requirements == ("alpha==1.0", "beta==1.0")


@pytest.mark.parametrize("damage", ["", "{", "[]", "[" * 100_000, '{"pins": 3, "direct": {}}', '{"pins": [3]}'])
def test_damaged(spec, root, damage):
    """Requirements are resolved again if the stored resolution cannot be read."""
    plan = plan_venv(spec)
    stored = root / RESOLVED / plan.recipe.request
    text = stored.read_text()
    stored.write_text(damage)
    assert plan_venv(spec) == plan
    assert stored.read_text() == text


def test_unsatisfiable(links, root):
    """The error has uv's output, and nothing is left."""
    with pytest.raises(VenvBuildError, match="uv could not resolve the requirements") as caught:
        plan_venv(VenvSpec(requirements=["beta", "alpha>1"], no_index=True, env={"UV_FIND_LINKS": str(links)}))
    assert "pip compile" in caught.value.command
    assert any("requirements are unsatisfiable" in line for line in caught.value.output)
    assert list((root / RESOLVED).glob("[!.]*")) == []


def test_deadline(spec, root, calls, tmp_path, late_at):
    """uv is ended at the deadline."""
    late_at("pip compile")
    program = tmp_path / "bin" / "uv"
    program.write_text('#!/bin/sh\n[ "$1" = --version ] && echo uv 9.9.9 || exec sleep 6546\n')
    with pytest.raises(VenvTimeoutError, match="pip compile"):
        create_local_venv(spec, timeout_s=600)
    assert list((root / RESOLVED).glob("[!.]*")) == []


def test_another_python(links, tools):
    """Versions are those for the environment's Python, which need not be on the driver."""
    tools.make_wheel(links, "alpha", "2.0")
    other = "3.13" if sys.version_info[:2] != (3, 13) else "3.12"
    wanted = [f"alpha==1.0; python_version=='{other}'", f"alpha==2.0; python_version!='{other}'"]
    env = {"UV_FIND_LINKS": str(links)}
    specs = [VenvSpec(requirements=wanted, no_index=True, env=env, python=python) for python in (None, other)]
    assert [plan_venv(spec).recipe.requirements for spec in specs] == [("alpha==2.0",), ("alpha==1.0",)]


def test_settings_of_the_driver(links, tools, elsewhere, tmp_path, monkeypatch):
    """Variables of the driver that decide the result count, and replace those of a node."""
    tools.make_wheel(links, "alpha", "2.0")
    more = tmp_path / "more"
    shutil.copytree(links, more)
    tools.make_wheel(more, "alpha", "3.0")
    spec = VenvSpec(requirements=["alpha"], no_index=True)
    constraints = tmp_path / "constraints.txt"
    plans = []
    for name, value, version in (
        ("UV_FIND_LINKS", links, "2.0"),
        ("UV_FIND_LINKS", more, "3.0"),
        ("UV_RESOLUTION", "lowest", "1.0"),
        ("UV_CONSTRAINT", "alpha<3", "2.0"),
        ("UV_CONSTRAINT", "alpha<2", "1.0"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("UV_FIND_LINKS", str(more))
            if name == "UV_CONSTRAINT":
                constraints.write_text(value)
                value = constraints
            patch.setenv(name, str(value))
            plans.append(plan_venv(spec))
        assert plans[-1].recipe.requirements == (f"alpha=={version}",)
    assert len({plan.recipe.fingerprint for plan in plans}) == len(plans)

    constraints.unlink()  # it is not on the node
    for name, value in (("UV_FIND_LINKS", "/nowhere"), ("UV_NO_BINARY", ":all:"), ("UV_CONSTRAINT", "/nowhere")):
        monkeypatch.setenv(name, value)
    assert tools.says(elsewhere(plans[4]), VERSION) == "1.0"


@pytest.mark.parametrize("name", ["UV_CONFIG_FILE", "UV_BUILD_CONSTRAINT"])
def test_files_that_are_not_sent(name, monkeypatch):
    """A file that every node would need is refused by the name of its variable."""
    with pytest.raises(ValueError, match=f"{name} names a file that the nodes may lack. Unset it"):
        read_draft(VenvSpec(requirements=["alpha"], env={name: "/some/file"}))
    monkeypatch.setenv(name, "/some/file")
    with pytest.raises(ValueError, match=f"{name} names a file that the nodes may lack. Unset it"):
        read_draft(VenvSpec(requirements=["alpha"]))


def test_constraints_that_cannot_be_read(monkeypatch):
    """A file of this machine that is missing is named with its variable."""
    monkeypatch.setenv("UV_CONSTRAINT", "/nowhere/constraints.txt")
    with pytest.raises(ValueError, match=r"UV_CONSTRAINT names /nowhere/constraints.txt, which cannot be read"):
        read_draft(VenvSpec(requirements=["alpha"]))


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git(make_project, tools, elsewhere, links, tmp_path):
    """A branch means the commit that it named when it was resolved."""
    folder = make_project("delta", dependencies=["alpha"], lock=False)

    def commit(answer):
        (folder / "src" / "delta" / "__init__.py").write_text(f"answer = {answer}\n")
        who = ["-c", "user.name=x", "-c", "user.email=x@localhost"]
        for words in (["init", "-q", "-b", "main"], ["add", "."], [*who, "commit", "-qm", "x"]):
            subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)

    commit(1)
    for at in ("", "@main"):
        wanted = [f"delta @ git+{folder.as_uri()}{at}"]
        spec = VenvSpec(requirements=wanted, no_index=True, env={"UV_FIND_LINKS": str(links)})
        plan = plan_venv(spec)
        commit(2 if at else 1.5)
        assert re.fullmatch(rf"delta ?@ git\+{folder.as_uri()}@[0-9a-f]{{40}}", plan.recipe.requirements[0])
        python = elsewhere(plan, f"node{at}")
        assert tools.says(python, "import alpha, delta; print(delta.answer)") == ("1.5" if at else "1")


def test_prune(spec, root):
    """A resolution stays for 30 days after its last use, and while an environment of it exists."""
    built, unbuilt = spec, dataclasses.replace(spec, requirements=["alpha"])
    python = create_local_venv(built)
    plan_venv(unbuilt)
    stored = {one: root / RESOLVED / read_draft(one).recipe.request for one in (built, unbuilt)}
    prune(older_than=86_400)
    assert all(path.exists() for path in stored.values())
    for path in stored.values():
        os.utime(path, (time.time() - 31 * 86_400,) * 2)
    prune(older_than=86_400, keep=[unbuilt])
    assert all(path.exists() for path in stored.values())
    plan_venv(unbuilt)  # asked for again
    prune(older_than=86_400)
    assert stored[unbuilt].exists()
    os.utime(stored[unbuilt], (0, 0))
    prune(older_than=86_400)
    assert [path.exists() for path in stored.values()] == [True, False]
    assert Path(python).exists()


def test_variables_of_uv():
    """Every variable that uv's help names counts, unless it is known to be neutral or belongs to one environment."""
    named = set()
    for command in (["pip", "compile"], ["pip", "install"], ["venv"], ["sync"], ["build"]):
        shown = subprocess.run([find_uv_bin(), *command, "--help"], capture_output=True, text=True, check=True).stdout
        named |= set(re.findall(r"env: (UV_\w+)", shown))
    assert len(named) > 20
    deciding = {one for one in named if is_deciding(one)}
    assert {"UV_INDEX", "UV_NO_BINARY", "UV_RESOLUTION", "UV_TORCH_BACKEND"} <= deciding
    assert [one for one in deciding if re.fullmatch(r"UV_(CACHE|MANAGED|NO_MANAGED|PYTHON).*", one)] == []
    assert is_deciding("UV_A_VARIABLE_OF_TOMORROW")


def test_complete_is_pure(spec):
    """A plan is a function of what was read and of its resolution."""
    draft = read_draft(spec)
    assert draft.complete(Resolution(("alpha==1.0",))) == draft.complete(Resolution(("alpha==1.0",)))
    assert draft.complete(Resolution(("alpha==1.0",))).recipe.requirements == ("alpha==1.0",)
    assert draft.resolve(Session(Deadline(60))) == Resolution(("alpha==1.0", "beta==1.0"))
