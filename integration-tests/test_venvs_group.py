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


def make_project(folder: Path, wheels: Path, version: str) -> Path:
    """Write and lock a project that contains the worker class and depends on the package and on Ray."""
    (folder / "src" / "far_away").mkdir(parents=True)
    (folder / "src" / "far_away" / "__init__.py").write_text(WORKER)
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "far-away"\nversion = "0.1"\nrequires-python = ">=3.11"\n'
        f'dependencies = ["only_here=={version}", "ray=={ray.__version__}"]\n'
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[tool.hatch.build.targets.wheel]\npackages = ["src/far_away"]\n'
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
                project=make_project(folder / f"project-{version}", folder, version), find_links=[str(folder)]
            )
            for version in ("1.0", "2.0")
        }


@pytest.mark.timeout(600)
def test_two_versions_side_by_side(local_ray, specs):
    """Two groups of one job run one class with two versions of a package that the driver cannot import."""
    with pytest.raises(ImportError):
        import only_here  # noqa: F401
    builder = RayWorkerBuilder("far_away.Worker", 40)
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


@pytest.mark.timeout(600)
def test_registered_environment(local_ray, specs):
    """Without `python=`, a class starts and restarts in the environment that is registered for it."""
    register_actor_env("far_away.Worker", specs["2.0"])
    try:
        with (
            RayVirtualCluster([1], use_gpus=False) as cluster,
            RayWorkerGroup(cluster, RayWorkerBuilder("far_away.Worker", 40)) as group,
        ):
            assert group.call("facts", collect=()).result()[0] == "2.0"
            os.kill(group.get_worker_status()[0].pid, 9)
            deadline = time.monotonic() + 60
            while not group.restart_failed_workers():
                assert time.monotonic() < deadline, "the group did not detect that the worker died"
                time.sleep(0.05)
            assert group.call("facts", collect=()).result()[0] == "2.0"
    finally:
        del actor_environments["far_away.Worker"]


def test_environment_cannot_be_built(local_ray, specs):
    """The error contains uv's message and the node, and no worker is left running."""
    offline = {"find_links": specs["1.0"].find_links, "no_index": True}
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        missing = VenvSpec(requirements=["no-such-package"], **offline)
        with pytest.raises(WorkerStartError, match=r"(?s)cannot run the workers:.*no-such-package"):
            RayWorkerGroup(cluster, "far_away.Worker", python=missing)
        without_ray = VenvSpec(requirements=["only_here"], **offline)
        with pytest.raises(WorkerStartError, match=r"on node .* has ray none"):
            RayWorkerGroup(cluster, "far_away.Worker", python=without_ray)
        with pytest.raises(TypeError, match="python must be a VenvSpec"):
            RayWorkerGroup(cluster, "far_away.Worker", python=3)
