# SPDX-License-Identifier: Apache-2.0
"""Tests of worker groups in their own environments, with packages and versions that the driver does not have."""

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import ray
from uv import find_uv_bin

from fairlead_placement import RayVirtualCluster
from fairlead_venvs import VenvSpec, actor_environments, register_actor_env
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, WorkerStartError

WORKER = '''
import os
import sys

import only_here


class Worker:
    """A worker class that only the environment of its project contains."""

    def __init__(self, start):
        self.start = start

    def facts(self):
        return only_here.version, sys.prefix, os.environ["VIRTUAL_ENV"], os.environ["UV_PROJECT_ENVIRONMENT"]

    def add(self, value):
        return self.start + value
'''


def make_wheel(folder: Path, version: str) -> None:
    """Build a wheel of a package that the driver does not have."""
    info = f"only_here-{version}.dist-info"
    with zipfile.ZipFile(folder / f"only_here-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("only_here.py", f"version = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: only_here\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def make_project(folder: Path, wheels: Path, version: str, package: str = "far_away", code: str = WORKER) -> Path:
    """Write and lock a project that contains a worker class. Its extra `train` has the package; it depends on Ray."""
    (folder / "src" / package).mkdir(parents=True)
    (folder / "src" / package / "__init__.py").touch()
    (folder / "src" / package / "workers.py").write_text(code)
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "{package.replace("_", "-")}"\nversion = "0.1"\nrequires-python = ">=3.11"\n'
        f'dependencies = ["ray=={ray.__version__}"]\n'
        f'[project.optional-dependencies]\ntrain = ["only_here=={version}"]\n'
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        f'[tool.hatch.build.targets.wheel]\npackages = ["src/{package}"]\n'
    )
    env = {**os.environ, "UV_FIND_LINKS": str(wheels)}
    command = [find_uv_bin(), "lock", "--python", sys.executable]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    """Return a spec for each version of the package, with a project that locks this version."""
    folder = tmp_path_factory.mktemp("projects")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAIRLEAD_VENV_DIR", str(tmp_path_factory.mktemp("venvs")))
        for version in ("1.0", "2.0"):
            make_wheel(folder, version)
        yield {
            version: VenvSpec(
                project=make_project(folder / f"project-{version}", folder, version),
                extras=["train"],
                find_links=[str(folder)],
            )
            for version in ("1.0", "2.0")
        }


@pytest.mark.timeout(600)
def test_two_versions_side_by_side(local_ray, specs):
    """Two groups of one job run one class with two versions of a package that the driver cannot import."""
    with pytest.raises(ImportError):
        import only_here  # noqa: F401
    builder = RayWorkerBuilder("far_away.workers.Worker", 40)
    with (
        RayVirtualCluster([4], use_gpus=False, max_colocated_worker_groups=2) as cluster,
        RayWorkerGroup(cluster, builder, workers_per_node=2, python=specs["1.0"]) as old,
        RayWorkerGroup(cluster, builder, workers_per_node=2, python=specs["2.0"]) as new,
    ):
        facts = old.call("facts").result() + new.call("facts").result()
        assert [version for version, *_ in facts] == ["1.0", "1.0", "2.0", "2.0"]
        for _, prefix, *variables in facts:
            assert variables == [prefix, prefix]
        assert old.call("add", 2).result() == new.call("add", 2).result() == [42, 42]
        assert new.call("add", old.call("add", 1, collect=())).result() == [81, 81]


POLICY = """
import only_here


class Policy:
    def train(self, samples):
        return f"{only_here.version} trained on {samples}"
"""
ENGINE = """
import only_here


class Engine:
    def generate(self, prompts):
        return [f"{prompt} by {only_here.version}" for prompt in prompts]
"""


@pytest.mark.timeout(600)
def test_guide(specs, tmp_path):
    """The first example of the guide on several environments runs, with a project and a package that are made here."""
    page = Path(__file__).parent.parent / "docs" / "guides" / "several-environments.md"
    example = page.read_text().split("```python\n")[1].split("```")[0]
    for there, here in (
        ("[8, 8]", "[1, 1], use_gpus=False"),
        ("[:8]", "[:1]"),
        ("[8:]", "[1:]"),
        ("vllm==0.32.0", "only_here==2.0"),
        ("ray==2.60.0", f"ray=={ray.__version__}"),
    ):
        assert there in example
        example = example.replace(there, here)
    start = "from fairlead_placement import init_ray\n\ninit_ray(address='local', num_cpus=2)\n"
    (tmp_path / "driver.py").write_text(start + example)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels, "1.0")
    make_wheel(wheels, "2.0")
    make_project(tmp_path / "trainer", wheels, "1.0", "trainer", POLICY)
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout" / "workers.py").write_text(ENGINE)
    env = {**os.environ, "UV_FIND_LINKS": str(wheels), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    command = [sys.executable, "driver.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1.0 trained on ['a prompt by 2.0']"


@pytest.mark.timeout(600)
def test_registered_environment(local_ray, specs):
    """Without `python=`, a class starts and restarts in the environment that is registered for it."""
    register_actor_env("far_away.workers.Worker", specs["2.0"])
    try:
        with (
            RayVirtualCluster([1], use_gpus=False) as cluster,
            RayWorkerGroup(cluster, RayWorkerBuilder("far_away.workers.Worker", 40)) as group,
        ):
            assert group.call("facts", collect=()).result()[0] == "2.0"
            os.kill(group.get_worker_status()[0].pid, 9)
            deadline = time.monotonic() + 60
            while not group.restart_failed_workers():
                assert time.monotonic() < deadline, "the group did not detect that the worker died"
                time.sleep(0.05)
            assert group.call("facts", collect=()).result()[0] == "2.0"
    finally:
        del actor_environments["far_away.workers.Worker"]


def test_environment_cannot_be_built(local_ray, specs):
    """The error contains uv's message and the node, and no worker is left running."""
    offline = {"find_links": specs["1.0"].find_links, "no_index": True}
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        missing = VenvSpec(requirements=["no-such-package"], **offline)
        with pytest.raises(WorkerStartError, match=r"(?s)cannot run the workers:.*no-such-package"):
            RayWorkerGroup(cluster, "far_away.workers.Worker", python=missing)
        without_ray = VenvSpec(requirements=["only_here"], **offline)
        with pytest.raises(WorkerStartError, match=r"on node .* has ray none"):
            RayWorkerGroup(cluster, "far_away.workers.Worker", python=without_ray)
        with pytest.raises(TypeError, match="python must be a VenvSpec"):
            RayWorkerGroup(cluster, "far_away.workers.Worker", python=3)
