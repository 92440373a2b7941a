# SPDX-License-Identifier: Apache-2.0
"""Environments on the nodes of a cluster, and workers that run in them. Several hosts are tested elsewhere."""

import dataclasses
import inspect
import json
import os
import shutil
import sys
import time
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
    actor_environments,
    create_local_venv,
    create_local_venv_on_each_node,
    ensure_venvs,
    ensure_worker_env,
    make_actor_runtime_env,
    register_actor_env,
)
from fairlead_venvs.__main__ import fetch
from fairlead_venvs._build.node_task import build_here, look_here, probe_here
from fairlead_venvs._build.uv import Deadline
from fairlead_venvs._cluster import ensure
from fairlead_venvs._cluster.rpc import alive_nodes, run_on_nodes
from fairlead_venvs._planning.plan import plan_venv

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
    assert create_local_venv_on_each_node(spec_of("beta")) == python == create_local_venv(spec_of("beta"))
    (node,) = [row["NodeID"] for row in ray.nodes()]
    assert create_local_venv_on_each_node(spec_of("beta"), nodes=[node]) == python
    assert Path(python).parent.parent.stat().st_ctime_ns == built


def test_requests_to_the_head(worker_spec, monkeypatch):
    """To find an environment that is there takes one request to Ray's head, however many nodes there are."""
    spec = worker_spec(f"ray=={ray.__version__}")
    create_local_venv_on_each_node(spec)
    made = []
    state = type(ray._private.state.state)

    def count(name, method):
        def counted(*args, **kwargs):
            made.append(name)
            return method(*args, **kwargs)

        return counted

    for name, method in inspect.getmembers(state, inspect.isfunction):
        if not name.startswith("_"):
            monkeypatch.setattr(state, name, count(name, method))
    ensure_worker_env(spec)
    assert made == ["node_table"]
    create_local_venv_on_each_node(spec)
    assert made == ["node_table"] * 2
    ensure_worker_env(f"{Path(sys.executable).parent}/../bin/python")  # another spelling of this interpreter
    assert made == ["node_table"] * 3


def test_several(spec_of, make_project, project_spec, tools, tmp_path):
    """Several specs, one of them a project, are built at once; equal content is built once."""
    count = tmp_path / "built"
    note = ["python", "-c", f"open({str(count)!r}, 'a').write('once ')"]
    specs = [spec_of("alpha", setup=note), project_spec(make_project()), spec_of("alpha", "alpha", setup=note)]
    first, second, third = ensure_venvs(specs)
    assert first == third
    assert count.read_text() == "once "
    assert tools.says(second, "import proj; print(proj.answer)") == "42"


def test_too_large(spec_of, monkeypatch):
    """Files that are too large to send are an error of their environment, and stop no other one."""
    monkeypatch.setattr("fairlead_venvs._cluster.ensure.LIMIT_BYTES", 100)
    register_actor_env("package.module.Large", spec_of("alpha"))
    register_actor_env("package.module.Small", VenvSpec(requirements=[]))
    try:
        nodes = alive_nodes()
        large, small = [fetch(f"package.module.{name}", nodes, Deadline(600)) for name in ("Large", "Small")]
    finally:
        actor_environments.clear()
    assert (large[0], small[0]) == ("failed", "built")
    assert "too large to send" in large[1]
    with pytest.raises(VenvBuildError, match="too large to send"):
        create_local_venv_on_each_node(spec_of("alpha"))


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


@pytest.mark.parametrize(("wanted", "found"), [([], "none"), (["needs_old_ray"], "2.0.0")])
def test_another_ray(worker_spec, wanted, found):
    """An environment without Ray or with another version is refused for workers, and the error says what to add."""
    with pytest.raises(VenvNodesError) as caught:
        ensure_worker_env(worker_spec(*wanted))
    error = only(caught)
    assert isinstance(error, VenvMismatchError)
    assert (error.component, error.actual, error.required) == ("ray", found, ray.__version__)
    assert f"Ask for 'ray=={ray.__version__}'" in str(error)


def test_a_pin_of_another_ray(root):
    """A pin that excludes the cluster's Ray is refused before anything is built."""
    spec = VenvSpec(requirements=["alpha", "ray[default]==2.0.0"], no_index=True)
    with pytest.raises(VenvMismatchError) as caught:
        ensure_worker_env(spec)
    assert (caught.value.actual, caught.value.required) == ("==2.0.0", ray.__version__)
    assert str(caught.value) == (
        f"{spec!r} has ray ==2.0.0, but a worker of this cluster needs ray {ray.__version__}. Ask for "
        f"'ray=={ray.__version__}' in its requirements, or in the dependencies of its project and lock it again "
        "(`uv add`)."
    )
    with pytest.raises(VenvMismatchError):
        ensure_worker_env("uv run --no-project --with alpha --with 'ray<2.1'")
    assert not root.exists()


def test_a_lock_of_another_ray(root, ray_wheels, make_project, tools):
    """The lock of a project says which Ray its groups and extras would install."""
    groups = '[dependency-groups]\nold = ["needs_old_ray"]\n'
    folder = make_project(dependencies=["alpha==2.0"], more=groups, lock=False)
    tools.lock_project(folder, ray_wheels)
    with pytest.raises(VenvMismatchError, match=rf"The lock in {folder} has ray 2\.0\.0, but a worker .* needs ray"):
        ensure_worker_env(VenvSpec(project=folder, groups=["old"]))
    assert not root.exists()
    # Without that group the lock excludes no Ray, and the build shows that Ray is missing.
    spec = VenvSpec(project=folder, find_links=[str(ray_wheels)], no_index=True, install_project=False)
    with pytest.raises(VenvNodesError, match="cannot start the workers"):
        ensure_worker_env(spec)


def test_another_python(worker_spec):
    """Another version of Python than the cluster's is refused before any node is called."""
    other = "3.12" if sys.version_info[:2] != (3, 12) else "3.13"
    with pytest.raises(VenvMismatchError, match=rf"has python {other}, but a worker of this cluster needs python"):
        ensure_worker_env(VenvSpec(requirements=[], python=other))


def test_interpreters(tmp_path):
    """An existing interpreter is probed on each node; the driver's own needs no runtime_env."""
    assert ensure_worker_env(PY_EXECUTABLES.SYSTEM).runtime_env == {}
    link = tmp_path / "a python"
    link.symlink_to(sys.executable)
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho oh no >&2; exit 3\n")
    broken.chmod(0o755)
    for path, said in ((broken, "(exit status 3)"), (tmp_path / "nowhere", "does not run")):
        with pytest.raises(VenvNodesError) as caught:
            ensure_worker_env(str(path))
        assert said in str(only(caught))
    assert only(caught).output == ()
    for line, status in (("hello", "ready"), ("5", "ready")):
        broken.write_text(f'#!/bin/sh\necho {line}; exec {sys.executable} "$@"\n')
        assert probe_here(str(broken), 60)[0] == status
    broken.write_text("#!/bin/sh\necho 5\n")
    assert probe_here(str(broken), 60)[:2] == ("failed", "VenvBuildError")
    other = create_local_venv(VenvSpec(requirements=[]))
    with pytest.raises(VenvNodesError) as caught:
        ensure_worker_env(other)
    assert only(caught).actual == "none"


def test_classes(worker_spec):
    """The environment of a worker class is found by the class's name."""
    spec = worker_spec(f"ray=={ray.__version__}")
    register_actor_env("package.module.Worker", spec)
    register_actor_env("package.module.Plain", PY_EXECUTABLES.SYSTEM)
    try:
        runtime_env = make_actor_runtime_env("package.module.Worker")
        assert runtime_env == ensure_worker_env("package.module.Worker").runtime_env
        assert runtime_env["py_executable"] == create_local_venv(spec)
        assert make_actor_runtime_env("package.module.Plain") == {}
    finally:
        actor_environments.clear()
    with pytest.raises(ValueError, match=r"no environment is known for the worker class 'package.module.Worker'"):
        make_actor_runtime_env("package.module.Worker")


@pytest.mark.smoke
def test_errors_of_nodes(spec_of):
    """The error of a node has the node and the output of uv."""
    with pytest.raises(VenvNodesError, match="1 of 1 environments are not ready, on ") as caught:
        create_local_venv_on_each_node(spec_of("alpha", setup=NO_LUCK))
    error = only(caught)
    assert isinstance(error, VenvBuildError)
    assert error.output == ("no luck",)


def test_variables_of_a_build(spec_of, tmp_path):
    """A build on a node has the variables of the node, and not those that Ray sets for a task."""
    script = f"import json, os; json.dump(dict(os.environ), open({str(tmp_path / 'variables')!r}, 'w'))"
    create_local_venv_on_each_node(spec_of("alpha", setup=["python", "-c", script]))
    variables = json.loads((tmp_path / "variables").read_text())

    def look():
        from_raylet = Path(f"/proc/{os.getppid()}/environ").read_text().split("\0")
        return dict(entry.split("=", 1) for entry in from_raylet if "=" in entry), dict(os.environ)

    of_node, of_task = ray.get(ray.remote(num_cpus=0)(look).remote(), timeout=150)
    put = {name for name in of_task if of_task[name] != of_node.get(name)}
    assert "RAY_JOB_ID" in put
    assert {name for name in put if variables.get(name) == of_task[name]} == set()
    assert variables["HOME"] == of_node["HOME"]


def test_errors_before_nodes(spec_of, root):
    """The driver reports requirements that nothing satisfies, and calls no node."""
    with pytest.raises(VenvBuildError, match="uv could not resolve the requirements") as caught:
        create_local_venv_on_each_node(spec_of("alpha==3.0"))
    assert caught.value.node is None
    assert any("there is no version of alpha==3.0" in line for line in caught.value.output)
    assert [path.name for path in root.iterdir()] == [".resolved"]


def test_a_node_that_joins_later(spec_of, tools, tmp_path):
    """A node that joins later gets the versions of the others, although the index has newer ones by now."""
    tools.make_wheel(tmp_path, "alpha", "1.0")
    tools.make_wheel(tmp_path, "beta", requires=["alpha"])
    spec = spec_of("beta", find_links=(), env={"UV_FIND_LINKS": str(tmp_path)})
    python = create_local_venv_on_each_node(spec)
    tools.make_wheel(tmp_path, "alpha", "2.0")
    shutil.rmtree(Path(python).parent.parent)  # it is not there on a new node

    assert create_local_venv_on_each_node(spec) == python
    assert tools.says(python, "import alpha; print(alpha.version)") == "1.0"


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


def test_deadline(spec_of, tools, monkeypatch, eventually):
    """The error names a node that takes too long, and its processes are ended (seam: the start of the builds)."""
    make_builds = ensure._make_builds

    def make_late(plan, nodes, deadline):
        deadline._end = time.monotonic() + 3.0
        return make_builds(plan, nodes, deadline)

    monkeypatch.setattr(ensure, "_make_builds", make_late)
    with pytest.raises(VenvNodesError) as caught:
        create_local_venv_on_each_node(spec_of("alpha", setup=["sleep", "6544"]), timeout_s=600)
    assert isinstance(only(caught), VenvTimeoutError)
    assert eventually(lambda: tools.running("sleep\0006544") == [], 60)


def test_a_node_that_does_not_look(spec_of, monkeypatch):
    """A node that does not say in time whether it has the environment still builds it (seam: its look)."""
    monkeypatch.setattr(ensure.node_task, "look_here", lambda *_: time.sleep(600))
    assert create_local_venv_on_each_node(spec_of("alpha"), timeout_s=20) == create_local_venv(spec_of("alpha"))


@pytest.mark.nightly
def test_interrupted(spec_of, tools, tmp_path):
    """An interrupted driver ends the processes of the nodes, and no incomplete environment is left."""
    up = tmp_path / "up"
    plan = plan_venv(spec_of("alpha", setup=["sh", "-c", f"touch {up}; exec sleep 6545"]))
    there = alive_nodes()
    files = [ray.put([(name, one if isinstance(one, bytes) else one.read_bytes()) for name, one in plan.files])]
    calls = {node: (node, build_here, (dataclasses.asdict(plan.recipe), files, 600.0)) for node in there.labels}

    def interrupt(_):
        if up.exists():
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            run_on_nodes(calls, there, doing="building", deadline=Deadline(120), report=interrupt)
        assert tools.running("sleep\0006545") == []
    finally:
        for pid in tools.running("sleep\0006545"):
            os.kill(int(pid), 9)


def test_another_platform(spec_of):
    """A node of another platform is refused before it looks for the environment."""
    recipe = plan_venv(spec_of("alpha")).recipe
    here = recipe.platform
    answer = look_here(recipe.folder, recipe.fingerprint, "plan9-alpha-other")
    assert answer == ("failed", "VenvMismatchError", ("platform", here, "plan9-alpha-other", "It", None))
    answer = build_here(dataclasses.asdict(dataclasses.replace(recipe, platform="plan9-alpha-other")), [], 9.0)
    assert answer[:2] == ("failed", "VenvMismatchError")


def test_misuse(spec_of):
    """Unknown nodes and an empty list of nodes are refused."""
    with pytest.raises(ValueError, match=r"no nodes that are alive have the ids \['nowhere'\]"):
        create_local_venv_on_each_node(spec_of("alpha"), nodes=["nowhere"])
    with pytest.raises(ValueError, match="list of node ids"):
        create_local_venv_on_each_node(spec_of("alpha"), nodes=[])
    with pytest.raises(ValueError, match="list of node ids"):
        create_local_venv_on_each_node(spec_of("alpha"), nodes="abc")
    with pytest.raises(ValueError, match="plain word"):
        create_local_venv_on_each_node(spec_of("alpha"), "../x")
