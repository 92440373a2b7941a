# SPDX-License-Identifier: Apache-2.0
"""Environments on the nodes of a cluster, and workers that run in them. Several hosts are tested elsewhere."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import ray

from fairlead_venvs import (
    PY_EXECUTABLES,
    VenvBuildError,
    VenvMismatchError,
    VenvNodesError,
    VenvSpec,
    VenvTimeoutError,
    create_local_venv,
    create_local_venv_on_each_node,
    ensure_venvs,
    ensure_worker_env,
)

pytestmark = pytest.mark.usefixtures("local_ray")


NO_LUCK = ["python", "-c", "import sys; sys.exit('no luck')"]


class Worker:
    def facts(self):
        import alpha

        return sys.executable, sys.prefix, os.environ["VIRTUAL_ENV"], alpha.version, shutil.which("alpha-says")


@pytest.fixture(scope="module")
def ray_wheels(tools, wheels, tmp_path_factory):
    """Wheels, with two of Ray: the version that runs here, and an old one."""
    folder = tmp_path_factory.mktemp("ray-wheels")
    for wheel in wheels.iterdir():
        shutil.copy(wheel, folder)
    for version in (ray.__version__, "2.0.0"):
        tools.ray_wheel(folder, version)
    tools.make_wheel(folder, "needs_old_ray", requires=["ray==2.0.0"])
    return folder


@pytest.fixture
def worker_spec(ray_wheels):
    return lambda *wanted: VenvSpec(requirements=["alpha==2.0", *wanted], find_links=[str(ray_wheels)], no_index=True)


def only(caught):
    """The one error in a group."""
    assert type(caught.value) is VenvNodesError
    (error,) = caught.value.exceptions
    assert ray.util.get_node_ip_address() in error.node
    return error


@pytest.mark.smoke
def test_full_cluster(spec_of, tools):
    """An environment is built although every CPU is in use, and later calls find it, also on this machine."""

    class Hog:
        def up(self):
            return True

    cpus = ray.cluster_resources()["CPU"]
    hog = ray.remote(Hog).options(num_cpus=cpus).remote()
    assert ray.get(hog.up.remote(), timeout=150)
    python = create_local_venv_on_each_node(spec_of("beta"))
    ray.kill(hog)

    assert tools.says(python, "import alpha; print(alpha.version)") == "2.0"
    built = Path(python).parent.parent.stat().st_ctime_ns
    (node,) = [row["NodeID"] for row in ray.nodes()]
    again = create_local_venv_on_each_node(spec_of("beta"), nodes=[node])
    assert again == python == create_local_venv(spec_of("beta"))
    assert Path(python).parent.parent.stat().st_ctime_ns == built


def test_several(spec_of, make_project, project_spec, tools, tmp_path):
    """Several specs, one of them a project, are built at once; equal content is built once."""
    count = tmp_path / "built"
    note = ["python", "-c", f"open({str(count)!r}, 'a').write('once ')"]
    specs = [spec_of("alpha", setup=note), project_spec(make_project()), spec_of("alpha", "alpha", setup=note)]
    first, second, third = ensure_venvs(specs)
    assert first == third
    assert count.read_text() == "once "
    assert tools.says(second, "import proj; print(proj.answer)") == "42"


@pytest.mark.smoke
def test_worker(worker_spec, tmp_path, monkeypatch):
    """An actor runs in the environment, with its Python, its packages, and its scripts on the path."""
    monkeypatch.setenv("FAIRLEAD_VENV_DIR", str(tmp_path / "it's a folder"))
    env = ensure_worker_env(worker_spec(f"ray=={ray.__version__}"))
    worker = ray.remote(Worker).options(num_cpus=0, runtime_env=dict(env.runtime_env)).remote()
    folder = str(Path(env.python).parent.parent)
    facts = ray.get(worker.facts.remote(), timeout=150)
    ray.kill(worker)

    assert facts == (env.python, folder, folder, "2.0", f"{folder}/bin/alpha-says")
    assert set(env.runtime_env) == {"py_executable", "env_vars"}
    assert set(env.runtime_env["env_vars"]) == {"PATH", "VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT"}


def test_without_ray(worker_spec):
    """An environment without Ray is refused for workers by its nodes, and the error says what to add."""
    with pytest.raises(VenvNodesError) as caught:
        ensure_worker_env(worker_spec())
    error = only(caught)
    assert isinstance(error, VenvMismatchError)
    assert (error.component, error.actual, error.required) == ("ray", "none", ray.__version__)
    assert f"Ask for 'ray=={ray.__version__}'" in str(error)


def test_another_ray(root, ray_wheels, worker_spec, make_project, tools):
    """Requirements or a lock that choose another Ray than the cluster's are refused before anything is built."""
    folder = make_project(more='[dependency-groups]\nold = ["needs_old_ray"]\n', lock=False)
    tools.lock_project(folder, ray_wheels)
    locked = VenvSpec(project=folder, groups=["old"], find_links=[str(ray_wheels)], no_index=True)
    for spec in (worker_spec("ray==2.0.0"), worker_spec("needs_old_ray"), locked):
        with pytest.raises(VenvMismatchError) as caught:
            ensure_worker_env(spec)
        assert (caught.value.actual, caught.value.required) == ("2.0.0", ray.__version__)
        assert " has ray 2.0.0, but a worker of this cluster needs ray" in str(caught.value)
    assert {path.name[:5] for path in root.iterdir()} == {".lock", ".note"}


def test_another_python(worker_spec):
    """Another version of Python than the cluster's is refused before any node is called."""
    other = "3.12" if sys.version_info[:2] != (3, 12) else "3.13"
    with pytest.raises(VenvMismatchError, match=rf"has python {other}, but a worker of this cluster needs python"):
        ensure_worker_env(VenvSpec(requirements=[], python=other))


def test_interpreters(tmp_path):
    """An existing interpreter is probed on each node; the driver's own needs no runtime_env."""
    assert ensure_worker_env(PY_EXECUTABLES.SYSTEM).runtime_env == {}
    program = tmp_path / "a python"
    program.touch(0o755)
    for script, said in (("echo oh no >&2; exit 3", "(exit status 3)"), ("echo 5", "does not report its version")):
        program.write_text(f"#!/bin/sh\n{script}\n")
        with pytest.raises(VenvNodesError, match="1 of 1 environments are not ready") as caught:
            ensure_worker_env(str(program))
        assert said in str(only(caught))
    program.write_text(f'#!/bin/sh\necho hello; exec {sys.executable} "$@"\n')
    assert ensure_worker_env(str(program)).python == str(program)


@pytest.mark.smoke
def test_errors_of_nodes(spec_of):
    """The error of a node has the node and the output of uv."""
    with pytest.raises(VenvNodesError, match="1 of 1 environments are not ready, on ") as caught:
        create_local_venv_on_each_node(spec_of("alpha", setup=NO_LUCK))
    error = only(caught)
    assert isinstance(error, VenvBuildError)
    assert error.output == ("no luck",)


def test_errors_of_actors(spec_of):
    """An error that an actor raises arrives as the class that its caller knows."""

    class Maker:
        def make(self, spec):
            return create_local_venv_on_each_node(spec)

    env_vars = {name: os.environ[name] for name in ("FAIRLEAD_VENV_DIR", "UV_CACHE_DIR")}
    maker = ray.remote(Maker).options(num_cpus=0, runtime_env={"env_vars": env_vars}).remote()
    with pytest.raises(VenvNodesError) as caught:
        ray.get(maker.make.remote(spec_of("alpha", setup=NO_LUCK)), timeout=150)
    ray.kill(maker)
    assert isinstance(caught.value.exceptions[0], VenvBuildError)


def test_misuse(spec_of):
    """Unknown nodes and an empty list of nodes are refused."""
    for nodes in (["nowhere"], [], "abc"):
        with pytest.raises(ValueError, match="nodes must be ids of nodes that are alive"):
            create_local_venv_on_each_node(spec_of("alpha"), nodes=nodes)
    with pytest.raises(ValueError, match="timeout_s"):
        create_local_venv_on_each_node(spec_of("alpha"), timeout_s=0)


def test_deadline(spec_of, tools, eventually):
    """The error names a node that takes too long, and its processes are ended."""
    spec = spec_of("alpha", setup=["sleep", "6544"])
    spec.fingerprint()
    with pytest.raises(VenvNodesError) as caught:
        create_local_venv_on_each_node(spec, timeout_s=10)
    assert isinstance(only(caught), VenvTimeoutError)
    assert eventually(lambda: tools.running("sleep\0006544") == [], 60)


@pytest.mark.nightly
def test_interrupted(spec_of, tools, tmp_path, eventually):
    """An interrupted driver ends the processes of the nodes, and no incomplete environment is left."""
    up = tmp_path / "up"
    code = f"""
        import ray
        from fairlead_venvs import VenvSpec, create_local_venv_on_each_node
        ray.init(address={ray.get_runtime_context().gcs_address!r}, log_to_driver=False)
        create_local_venv_on_each_node({spec_of("alpha", setup=["sh", "-c", f"touch {up}; exec sleep 6545"])!r})
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stderr=subprocess.PIPE, text=True) as driver:
        assert eventually(up.exists, 120)
        driver.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in driver.communicate(timeout=120)[1]
    assert eventually(lambda: tools.running("sleep\0006545") == [], 60)


# A sitecustomize after which nothing of Fairlead can be imported.
BARE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("fairlead"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
"""


def test_nodes_without_fairlead(spec_of, tmp_path, tools):
    """A node needs only Ray and uv: what runs there imports nothing of Fairlead."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(BARE)
    code = f"""
        import os, ray
        from fairlead_venvs import VenvSpec, create_local_venv_on_each_node
        environment = {{"PYTHONPATH": {str(tmp_path / "site")!r}}}
        ray.init(address="local", num_cpus=1, include_dashboard=False, runtime_env={{"env_vars": environment}})
        print(create_local_venv_on_each_node({spec_of("alpha")!r}))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert tools.says(done.stdout.splitlines()[-1], "import alpha; print(alpha.version)") == "2.0"
