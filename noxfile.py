# SPDX-License-Identifier: Apache-2.0
"""The one entry point: `nox` checks everything, `nox -s demo` shows the main job."""

import os
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "typecheck", "tests", "integration"]
nox.options.default_venv_backend = "uv|venv"

ROOT = Path(__file__).parent
# Which siblings each package stands on. Its tests get these and nothing else, so an undeclared import fails.
SIBLINGS = {
    "sharding": [],
    "batching": [],
    "placement": [],
    "venvs": [],
    "workergroup": ["sharding", "placement", "venvs"],
    "tpu-executor": ["placement"],
}
MULTIHOST = "integration-tests/multihost"
SOAK = f"{MULTIHOST}/test_soak.py"
RAY_ENV = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def package(name: str, extra: str = "") -> str:
    return f"./packages/{name}{extra}"


def install(session: nox.Session, *what: str) -> None:
    """Install local paths and requirements in one call, so that siblings are resolved to the tree."""
    # uv knows nothing of pip's settings: hand on the folder of local wheels, or torch is fetched with CUDA.
    env = {"UV_FIND_LINKS": os.environ["PIP_FIND_LINKS"]} if os.environ.get("PIP_FIND_LINKS") else {}
    session.install("-c", "constraints.txt", *what, env=env)


def test_requirements(name: str) -> list[str]:
    pyproject = nox.project.load_toml(ROOT / "packages" / name / "pyproject.toml")
    return nox.project.dependency_groups(pyproject, "test")


@nox.session
@nox.parametrize("name", list(SIBLINGS), ids=list(SIBLINGS))
def tests(session: nox.Session, name: str) -> None:
    """The tests of one package, with only its declared closure installed."""
    install(session, *map(package, [*SIBLINGS[name], name]), *test_requirements(name))
    session.run("pytest", f"packages/{name}", *session.posargs, env=RAY_ENV)


@nox.session
def integration(session: nox.Session) -> None:
    """What crosses packages, on a real local Ray."""
    install(session, *map(package, SIBLINGS), "psutil", "pytest", "pytest-timeout")
    session.run("pytest", "integration-tests", f"--ignore={MULTIHOST}", *session.posargs, env=RAY_ENV)


@nox.session
def multihost(session: nox.Session) -> None:
    """What crosses hosts: several on this machine, in network namespaces, which need root."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        session.skip("network namespaces need root, and the program ip (iproute2)")
    install(session, *map(package, SIBLINGS), "torch", "psutil", "pytest", "pytest-timeout")
    session.run("pytest", MULTIHOST, f"--ignore={SOAK}", *session.posargs, env=RAY_ENV)


@nox.session
def soak(session: nox.Session) -> None:
    """Random faults on several hosts while calls run, for 300 seconds: `nox -s soak -- 60` for so many."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        session.skip("network namespaces need root, and the program ip (iproute2)")
    install(session, *map(package, SIBLINGS), "torch", "psutil", "pytest", "pytest-timeout")
    seconds = session.posargs[0] if session.posargs else "300"
    limit = f"--timeout={int(seconds) + 300}"
    session.run("pytest", SOAK, "-s", limit, env={**RAY_ENV, "FAIRLEAD_SOAK_S": seconds})


@nox.session
def interop(session: nox.Session) -> None:
    """What touches torch, Ray or its metrics without needing them: tests that skip where they are not installed."""
    extras = package("placement", "[metrics]"), package("workergroup", "[torch]")
    requirements = [*test_requirements("placement"), *test_requirements("batching"), "torch", "scikit-learn"]
    install(session, *map(package, ["sharding", "batching", "venvs"]), *extras, *requirements)
    session.run("pytest", "packages/sharding/tests/test_interop.py", *session.posargs)
    session.run("pytest", "packages/workergroup/tests/test_torch.py", *session.posargs, env=RAY_ENV)
    tests = [*(f"placement/tests/test_{name}.py" for name in ("ports", "usage")), "workergroup/tests/test_watch.py"]
    session.run("pytest", *map(package, tests), "-k", "torch or metrics", *session.posargs, env=RAY_ENV)
    files = [f"packages/batching/tests/test_{name}.py" for name in ("torch", "ray")]
    session.run("pytest", *files, *session.posargs, env=RAY_ENV)


@nox.session
def demo(session: nox.Session) -> None:
    """The main job: a data- and tensor-parallel classifier trained on real data."""
    install(session, *map(package, [*SIBLINGS["workergroup"], "workergroup"]), "torch", "scikit-learn")
    session.run("python", "examples/train_digits.py", *session.posargs, env=RAY_ENV)


@nox.session
def survive(session: nox.Session) -> None:
    """The training of the demo, with a worker killed in the middle, ends with the same accuracy."""
    install(session, *map(package, [*SIBLINGS["workergroup"], "workergroup"]), "torch", "scikit-learn")
    session.run("python", "examples/survive.py", *session.posargs, env=RAY_ENV)


@nox.session
def grpo(session: nox.Session) -> None:
    """Reinforcement learning on two groups that share their slots; the reward has to rise."""
    install(session, *map(package, [*SIBLINGS["workergroup"], "workergroup", "batching"]), "torch", "matplotlib")
    session.run("python", "examples/grpo.py", *session.posargs, env=RAY_ENV)


@nox.session
def tpu_psum(session: nox.Session) -> None:
    """JAX over the hosts of pretend TPU slices, one of which is lost in the middle."""
    install(session, *map(package, [*SIBLINGS["tpu-executor"], "tpu-executor"]), "jax")
    session.run("python", "examples/tpu_psum.py", *session.posargs, env=RAY_ENV)


@nox.session
def lint(session: nox.Session) -> None:
    """Formatting, lint, and which package may import which."""
    install(session, "ruff", "import-linter")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    sources = os.pathsep.join(str(ROOT / "packages" / name / "src") for name in SIBLINGS)
    session.run("lint-imports", "--no-cache", "--no-logo", env={"PYTHONPATH": sources})


@nox.session
def typecheck(session: nox.Session) -> None:
    """mypy, strict, over every package; mypy and pyright over usage of them; no public name without a known type."""
    # With the extra pyright brings the program that runs it, and fetches none.
    install(session, "mypy", "pyright[nodejs]", *map(package, SIBLINGS))
    session.run("mypy", *(f"packages/{name}/src" for name in SIBLINGS), "typing_tests")
    session.run("pyright", "typing_tests")
    for name in SIBLINGS:
        # It fails below 100 %, and is quiet unless it does.
        imported = f"fairlead_{name.replace('-', '_')}"
        session.run("pyright", "--verifytypes", imported, "--ignoreexternal", silent=True)


@nox.session
def build(session: nox.Session) -> None:
    """Wheel and sdist of every package, checked."""
    install(session, "build", "hatchling", "twine")
    out = Path(session.create_tmp()).resolve() / "dist"
    session.run("python", "-c", f"import shutil; shutil.rmtree({str(out)!r}, ignore_errors=True)")
    for name in SIBLINGS:
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(out), package(name), silent=True)
    files = sorted(map(str, out.iterdir()))
    if len(files) != 2 * len(SIBLINGS):
        session.error(f"expected a wheel and an sdist of each of {len(SIBLINGS)} packages, found {files}")
    session.run("twine", "check", "--strict", *files)


@nox.session
def bench(session: nox.Session) -> None:
    """Speed as ratios against hand-written Ray, measured in one run."""
    siblings = [*SIBLINGS["workergroup"], "workergroup", "batching", "tpu-executor"]
    install(session, *map(package, siblings), "torch")
    session.run("python", "benchmarks/run.py", *session.posargs, env=RAY_ENV)


@nox.session
def pictures(session: nox.Session) -> None:
    """The pictures in the READMEs, drawn by what they show."""
    install(session, *map(package, [*SIBLINGS["workergroup"], "workergroup"]))
    session.run("python", "docs/draw_grid.py", env=RAY_ENV)


@nox.session(venv_backend="none")
def ci(session: nox.Session) -> None:
    """Everything a change has to pass: the defaults, several hosts, the built distributions, the examples, a soak."""
    for name in [*nox.options.sessions, "multihost", "build", "interop", "demo"]:
        for chosen in [f"tests({one})" for one in SIBLINGS] if name == "tests" else [name]:
            session.notify(chosen, posargs=[])
    session.notify("grpo", posargs=["--steps", "5", "--address", "local"])
    session.notify("survive", posargs=["--steps", "120", "--address", "local"])
    session.notify("soak", posargs=["60"])


if __name__ == "__main__":
    sys.exit("run nox instead: pip install nox && nox")
