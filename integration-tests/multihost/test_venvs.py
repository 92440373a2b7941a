# SPDX-License-Identifier: Apache-2.0
"""Tests of environments on hosts with separate folders, and on hosts that share one folder."""

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import ray
from uv import find_uv_bin

from fairlead_placement import RayVirtualCluster, init_ray
from fairlead_venvs import (
    UvUnavailableError,
    VenvBuildError,
    VenvNodesError,
    VenvSpec,
    create_local_venv,
    create_local_venv_on_each_node,
    ensure_worker_env,
)
from fairlead_workergroup import RayWorkerGroup


def make_wheel(folder, name, version, files):
    """Write a wheel that contains some files."""
    info = f"{name}-{version}.dist-info"
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(Path(folder, f"{name}-{version}-py3-none-any.whl"), "w") as wheel:
        for path, text in content.items():
            wheel.writestr(path, text)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with wheels and with a folder for environments."""
    folder = tmp_path_factory.mktemp("venvs")
    for name in ("wheels", "nothing", "seen"):
        (folder / name).mkdir()
    make_wheel(folder / "wheels", "alpha", "1.0", {"alpha.py": "name = 'alpha'\n"})
    return folder


@pytest.fixture(scope="module")
def apart(namespaces, place):
    """Start a head and four hosts, each with its own folder of environments. Only the head has the wheels."""
    from .hosts import Hosts

    with Hosts() as made:
        for number in range(5):
            own = place / f"host-{number}"
            own.mkdir()
            binds = {str(place / "seen"): str(own)}
            if number:
                binds[str(place / "wheels")] = str(place / "nothing")
            made.start_host(num_cpus=min(number, 1), binds=binds)
        yield made


@pytest.fixture
def env(place):
    """Return the environment variables of the drivers."""
    return {"FAIRLEAD_VENV_DIR": str(place / "seen"), "UV_CACHE_DIR": str(place / "uv-cache")}


def spec_of(place, *requirements, setup=()):
    return VenvSpec(
        requirements=requirements,
        find_links=[str(place / "wheels")],
        no_index=True,
        setup=setup,
        env={"UV_CACHE_DIR": str(place / "uv-cache")},
    )


def import_alpha(python):
    """Import alpha in the environment at this path on the node, and return its output or its error."""
    done = subprocess.run(
        [python, "-c", "import alpha; print(alpha.name)"], capture_output=True, text=True, timeout=240
    )
    return done.stdout.strip() or done.stderr


def import_alpha_on_each_node(python):
    """Return the result of `import_alpha` on each node, by address."""
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    results = {
        row["NodeManagerAddress"]: ray.remote(num_cpus=0)(import_alpha)
        .options(scheduling_strategy=affinity(row["NodeID"], soft=False))
        .remote(python)
        for row in ray.nodes()
        if row["Alive"]
    }
    return {address: ray.get(result, timeout=240) for address, result in results.items()}


def count_builds(place):
    """Return how many times each host has built an environment in its own folder."""
    return [
        len((own / "built").read_text().split()) for own in sorted(place.glob("host-*")) if (own / "built").exists()
    ]


def record_build(place):
    """Return a setup command that records a build."""
    return ["python", "-c", f"open({str(place / 'seen' / 'built')!r}, 'a').write('once ')"]


# A build backend in the project's own folder, which needs nothing from anywhere.
BACKEND = """
import pathlib, tarfile, tomllib, zipfile

def _read():
    project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
    lines = [f"Metadata-Version: 2.1\\nName: {project['name']}\\nVersion: {project['version']}\\n"]
    lines += [f"Requires-Dist: {wanted}\\n" for wanted in project.get("dependencies", [])]
    for extra, listed in project.get("optional-dependencies", {}).items():
        lines.append(f"Provides-Extra: {extra}\\n")
        lines += [f"Requires-Dist: {wanted}; extra == '{extra}'\\n" for wanted in listed]
    return f"{project['name']}-{project['version']}", project["name"], "".join(lines)

def build_wheel(folder, config_settings=None, metadata_directory=None):
    stem, name, metadata = _read()
    with zipfile.ZipFile(pathlib.Path(folder, f"{stem}-py3-none-any.whl"), "w") as wheel:
        wheel.write(f"{name}.py")
        tags = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
        for file, text in {"METADATA": metadata, "WHEEL": tags, "RECORD": ""}.items():
            wheel.writestr(f"{stem}.dist-info/{file}", text)
    return f"{stem}-py3-none-any.whl"

def build_sdist(folder, config_settings=None):
    stem, name, metadata = _read()
    pathlib.Path("PKG-INFO").write_text(metadata)
    with tarfile.open(pathlib.Path(folder, f"{stem}.tar.gz"), "w:gz") as sdist:
        for path in ("pyproject.toml", "backend.py", "PKG-INFO", f"{name}.py"):
            sdist.add(path, f"{stem}/{path}")
    return f"{stem}.tar.gz"
"""


def make_project(folder, name, dependencies, more=""):
    """Write a project of one module."""
    folder.mkdir()
    (folder / f"{name}.py").write_text(f"name = {name!r}\n")
    (folder / "backend.py").write_text(BACKEND)
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "{name}"\nversion = "0.1"\nrequires-python = ">=3.11"\ndependencies = {dependencies}\n'
        f'{more}[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )


@pytest.fixture(scope="module")
def numpy_specs(place):
    """Return two specs with another numpy than the driver's: requirements, and a project with a local dependency.

    The hosts have no network. They get the packages from uv's cache, which is filled here.
    """
    site = str(Path(ray.__file__).parent.parent)
    make_wheel(place / "wheels", "ray", ray.__version__, {"ray_of_the_tests.pth": f"{site}\n"})
    wanted = [f"ray=={ray.__version__}", "numpy==2.2.6"]
    make_project(place / "helper", "helper", ["alpha"])
    sources = '[tool.uv.sources]\nhelper = { path = "../helper", editable = true }\n'
    extra = f'[project.optional-dependencies]\nmath = ["numpy==2.2.6"]\n{sources}'
    make_project(place / "trainer", "trainer", [wanted[0], "helper"], extra)
    cache = {"UV_CACHE_DIR": str(place / "uv-cache")}
    lock = [find_uv_bin(), "lock", "--python", sys.executable, "--find-links", str(place / "wheels")]
    subprocess.run(lock, cwd=place / "trainer", env={**os.environ, **cache}, check=True, timeout=120)
    options = {"find_links": [str(place / "wheels")], "env": {**cache, "UV_OFFLINE": "1"}}
    filling = {**options, "env": cache}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAIRLEAD_VENV_DIR", str(place / "filling"))
        create_local_venv(VenvSpec(requirements=wanted, **filling))
        create_local_venv(VenvSpec(project=place / "trainer", extras=["math"], **filling))
    return (
        VenvSpec(requirements=wanted, **options),
        VenvSpec(project=place / "trainer", extras=["math"], **options),
    )


def test_groups_with_another_numpy(apart, place, env, numpy_specs):
    """Groups start on two hosts without a shared folder in environments with another numpy, also that of a project."""

    class Worker:
        def where(self):
            import importlib.util
            import sys

            import numpy

            own = [name for name in ("trainer", "helper", "alpha") if importlib.util.find_spec(name)]
            return numpy.__version__, own, sys.prefix, ray.util.get_node_ip_address()

    def driver():
        seen = []
        for spec in numpy_specs:
            with (
                RayVirtualCluster([1, 1], use_gpus=False) as cluster,
                RayWorkerGroup(cluster, Worker, python=spec) as group,
            ):
                seen.append(group.call("where").result())
        return seen

    plain, project = apart.drive(driver, env={**env, "UV_OFFLINE": "1"})
    for workers in (plain, project):
        assert {version for version, *_ in workers} == {"2.2.6"}
        assert len({address for *_, address in workers}) == 2
        assert all(prefix.startswith(str(place / "seen")) for _, _, prefix, _ in workers)
    assert [own for _, own, *_ in project] == [["trainer", "helper", "alpha"]] * 2
    assert [own for _, own, *_ in plain] == [[]] * 2
    # The hosts have built them in folders of their own.
    assert list((place / "seen").iterdir()) == []


def test_separate_folders(apart, place, env):
    """Each host builds the environment once, at the same path, from files that the driver sends.

    This works although all CPUs are in use. A second request builds nothing.
    """
    spec = spec_of(place, "alpha", setup=record_build(place))

    class Hog:
        def up(self):
            return True

    def driver():
        cpus = int(ray.cluster_resources()["CPU"])
        hogs = [ray.remote(Hog).options(num_cpus=1).remote() for _ in range(cpus)]
        assert all(ray.get([hog.up.remote() for hog in hogs], timeout=240))
        first = create_local_venv_on_each_node(spec)
        again = create_local_venv_on_each_node(spec)
        for hog in hogs:
            ray.kill(hog)
        return first, again, create_local_venv(spec), import_alpha_on_each_node(first)

    first, again, local, names = apart.drive(driver, env=env)
    assert first == again == local
    assert first.startswith(str(place / "seen"))
    assert names == dict.fromkeys(apart.addresses, "alpha")
    assert count_builds(place) == [1] * 5
    # The folder that all hosts share stays empty.
    assert list((place / "seen").iterdir()) == []


@pytest.mark.nightly
def test_host_joins_later(apart, place, env):
    """A host that joins later can get the environment on request, and a worker starts in it."""
    site = str(Path(ray.__file__).parent.parent)
    # This wheel replaces Ray's. It points to the Ray installation that runs the tests.
    make_wheel(place / "wheels", "ray", ray.__version__, {"ray_of_the_tests.pth": f"{site}\n"})
    spec = spec_of(place, "alpha", f"ray=={ray.__version__}", setup=record_build(place))
    cluster = apart.address
    own = place / "host-late"
    own.mkdir()

    class Worker:
        def where(self):
            import sys

            import alpha

            return sys.prefix, alpha.name, ray.util.get_node_ip_address()

    def driver():
        init_ray(address=cluster)
        before = [row["NodeID"] for row in ray.nodes() if row["Alive"]]
        yield ensure_worker_env(spec).python
        (late,) = [row["NodeID"] for row in ray.nodes() if row["Alive"] and row["NodeID"] not in before]
        prepared = ensure_worker_env(spec, nodes=[late])
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(late, soft=False)
        options = {"num_cpus": 0, "runtime_env": dict(prepared.runtime_env), "scheduling_strategy": affinity}
        worker = ray.remote(Worker).options(**options).remote()
        where = ray.get(worker.where.remote(), timeout=240)
        ray.kill(worker)
        yield prepared.python, where

    # The driver attaches itself, because the check at its end would report the host that joins.
    with apart.driver(driver, attach=False, env=env) as leading:
        python = leading.step()
        binds = {str(place / "seen"): str(own), str(place / "wheels"): str(place / "nothing")}
        late = apart.start_host(num_cpus=1, binds=binds)
        assert list(own.iterdir()) == []
        again, where = leading.step()
    assert again == python
    assert where == (str(Path(python).parent.parent), "alpha", late.address)
    assert (own / "built").read_text() == "once "


@pytest.mark.nightly
def test_hosts_that_fail(apart, place, env, eventually):
    """The error names the hosts where the setup fails, uv is missing or the host dies; other hosts are ready."""
    own = place / "host-without-uv"
    own.mkdir()
    binds = {str(place / "seen"): str(own)}
    without = apart.start_host(num_cpus=0, env={"FAIRLEAD_VENV_UV": "/nowhere/uv"}, binds=binds).address
    cluster = apart.address
    _, _, fails, dies, *_ = apart.addresses
    for address, mark in ((fails, "fail"), (dies, "sleep")):
        (place / f"host-{apart.addresses.index(address)}" / mark).touch()
    folder = str(place / "seen")
    script = f"""if True:
        import os, sys, time
        os.chdir({folder!r})
        if os.path.exists("fail"):
            sys.exit("no luck here")
        if os.path.exists("sleep"):
            open("asleep", "w").close()
            time.sleep(600)
    """
    spec = spec_of(place, "alpha", setup=["python", "-c", script])

    def alive_nodes():
        return {row["NodeManagerAddress"]: row["NodeID"] for row in ray.nodes() if row["Alive"]}

    def driver():
        init_ray(address=cluster)
        yield "ready"
        with pytest.raises(VenvNodesError) as caught:
            create_local_venv_on_each_node(spec)
        errors = [(type(error), error.node, getattr(error, "output", ())) for error in caught.value.exceptions]
        # A worker of the host that dies may be reported first, and Ray still lists the host then.
        deadline = time.monotonic() + 240
        while dies in (alive := alive_nodes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        left = [node for address, node in alive.items() if address not in (fails, without)]
        yield errors, str(caught.value), len(left), create_local_venv_on_each_node(spec, nodes=left)

    # The driver attaches itself, because the check at its end would report the host that dies.
    with apart.driver(driver, attach=False, env=env) as leading:
        leading.step()
        leading.resume()
        asleep = place / f"host-{apart.addresses.index(dies)}" / "asleep"
        assert eventually(asleep.exists, 240)
        apart.kill(apart.host_at(dies))
        errors, text, left, python = leading.receive()

    by_address = {node.split()[0]: (kind, output) for kind, node, output in errors}
    assert set(by_address) == {fails, dies, without}
    assert by_address[fails] == (VenvBuildError, ("no luck here",))
    assert by_address[dies][0] is VenvBuildError
    assert by_address[without][0] is UvUnavailableError
    assert text.startswith(f"3 of {len(apart.addresses)} environments are not ready, on ")
    assert left == len(apart.addresses) - 3
    assert python.startswith(folder)


@pytest.mark.nightly
def test_one_folder_for_all(hosts, place, tmp_path):
    """If the head and four hosts share one folder, one of them builds the environment, and all use it."""
    seen = tmp_path / "shared"
    count = tmp_path / "built"
    spec = spec_of(place, "alpha", setup=["python", "-c", f"open({str(count)!r}, 'a').write('once ')"])

    def driver():
        python = create_local_venv_on_each_node(spec)
        return python, import_alpha_on_each_node(python)

    python, names = hosts.drive(driver, env={"FAIRLEAD_VENV_DIR": str(seen)})
    assert python.startswith(str(seen))
    assert set(names.values()) == {"alpha"}
    assert set(names) >= set(hosts.addresses[:5])
    assert count.read_text() == "once "
