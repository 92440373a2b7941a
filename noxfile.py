# SPDX-License-Identifier: Apache-2.0
"""Run every check, example and benchmark: `nox` checks a change in minutes, `nox -s ci` checks the rest.

`nox -s demo` shows the main job.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "test"]
nox.options.default_venv_backend = "uv|venv"

ROOT = Path(__file__).parent
MULTIHOST, PLANTED = "integration-tests/multihost", "integration-tests/inspect"
# uv does not read pip's settings. It must trust the certificates of the machine, as pip does, and search the folder of
# local wheels that pip searches. Otherwise it downloads torch with CUDA.
UV_ENV = {"UV_SYSTEM_CERTS": "1"}
if os.environ.get("PIP_FIND_LINKS"):
    UV_ENV["UV_FIND_LINKS"] = os.environ["PIP_FIND_LINKS"]
# The first import of a module compiles it for the other processes. Where Python may write no bytecode, every worker of
# Ray would compile all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Packages come from the folders that a session names: the sources of the workspace would install siblings editable.
INSTALL_ENV = {**UV_ENV, "UV_NO_SOURCES": "1"}
# Which groups of requirements there are beside those of the packages.
GROUPS = nox.project.load_toml(ROOT / "pyproject.toml")
PYTEST = nox.project.dependency_groups(GROUPS, "test")
# Checks start a Ray of their own, whatever else runs on the machine.
RAY_ENV = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"}
# Examples and benchmarks do too, unless the user names a cluster.
EXAMPLE_ENV = {**RAY_ENV, "RAY_ADDRESS": os.environ.get("RAY_ADDRESS") or "local"}
# Two processes take the test files from one queue, in the order that conftest.py decides.
TWO_PROCESSES = ("--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder")


def siblings(name: str) -> list[str]:
    """Return the sibling packages that a package depends on, each after its own dependencies."""
    found: dict[str, None] = {}
    for requirement in nox.project.load_toml(ROOT / "packages" / name / "pyproject.toml")["project"]["dependencies"]:
        if sibling := re.match(r"fairlead-([a-z0-9-]+)", requirement):
            found.update(dict.fromkeys([*siblings(sibling[1]), sibling[1]]))
    return list(found)


# The siblings of each package. Its tests run with its declared dependencies only, so an undeclared import fails.
SIBLINGS = {path.parent.name: siblings(path.parent.name) for path in sorted(ROOT.glob("packages/*/pyproject.toml"))}


def package(name: str, extra: str = "") -> str:
    return f"./packages/{name}{extra}"


def import_name(name: str) -> str:
    """Return the name under which a package is imported."""
    return f"fairlead_{name.replace('-', '_')}"


def read_blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a language on a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [block.split("```")[0] for block in text.split(f"```{language}\n")[1:]]


def install(session: nox.Session, *what: str) -> None:
    """Install local paths and requirements in one call, so that siblings come from this repository."""
    session.install("-c", "constraints.txt", *what, env=INSTALL_ENV, silent=False)


def group(*names: str) -> tuple[str, ...]:
    """Return the requirements of groups in the root's pyproject.toml."""
    return nox.project.dependency_groups(GROUPS, *names)


def export_constraints(session: nox.Session) -> dict[str, str]:
    """Return the text of each file of constraints, exported from the lock. The session must have uv."""
    what = "--all-packages --all-extras --no-hashes --no-annotate --no-header --no-emit-workspace"
    groups = {"constraints.txt": ("--all-groups", "--no-group=verl"), "constraints-verl.txt": ("--group=verl",)}
    texts = {}
    for file, options in groups.items():
        command = ["uv", "export", "--frozen", "--quiet", *what.split(), "--no-default-groups", *options]
        texts[file] = f"# Exported from uv.lock by `nox -s lock`.\n{session.run(*command, silent=True, log=False)}"
    return texts


def build_wheels(session: nox.Session, *names: str) -> dict[str, Path]:
    """Build the wheels of packages into one folder, and return their paths. The session must have hatchling."""
    dist = make_folder(session, "dist")
    for name in names:
        with session.chdir(package(name)):
            session.run("python", "-m", "hatchling", "build", "--target=wheel", f"--directory={dist}", silent=True)
    return {name: next(dist.glob(f"{import_name(name)}-*.whl")) for name in names}


def make_index(session: nox.Session, files: Iterable[Path]) -> str:
    """Make a package index of these wheels in a folder, and return its URL."""
    index = make_folder(session, "index")
    for file in files:
        project = index / file.name.partition("-")[0].replace("_", "-")
        project.mkdir(exist_ok=True)
        with (project / "index.html").open("a", encoding="utf-8") as page:
            page.write(f'<a href="{file.as_uri()}">{file.name}</a>\n')
    return index.as_uri()


def test_requirements(name: str) -> list[str]:
    """Return the requirements of a package's tests, and the paths of the packages among them."""
    pyproject = nox.project.load_toml(ROOT / "packages" / name / "pyproject.toml")
    needed = nox.project.dependency_groups(pyproject, "test")
    return [package(one.removeprefix("fairlead-")) if one.startswith("fairlead-") else one for one in needed]


def all_test_requirements() -> list[str]:
    """Return what the tests of all packages need beside the packages."""
    needed = {one for name in SIBLINGS for one in test_requirements(name)}
    return sorted({*(one for one in needed if not one.startswith("./")), *PYTEST})


def make_folder(session: nox.Session, name: str) -> Path:
    """Make an empty folder for this session."""
    # Not create_tmp(), which moves TMPDIR as well: the path of a socket is limited to 107 bytes.
    folder = Path(session.virtualenv.location).resolve() / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def copy_tests(session: nox.Session, *names: str) -> Path:
    """Copy the tests of packages, and the files they read, to a folder without sources."""
    here = make_folder(session, "tests")
    for file in ("conftest.py", "pyproject.toml", "test-seconds.json"):
        shutil.copy(ROOT / file, here)
    shutil.copytree(ROOT / "fixtures", here / "fixtures")
    for name in names:
        shutil.copytree(ROOT / "packages" / name, here / "packages" / name, ignore=shutil.ignore_patterns("src"))
    return here


def run_tests(session: nox.Session, *arguments: str, python: str = "python", **env: str) -> None:
    """Run pytest with a folder for Ray of its own. Options that select no test are no error."""
    # The path is short, because that of a socket is limited to 107 bytes.
    with tempfile.TemporaryDirectory(prefix="fl-", ignore_cleanup_errors=True) as folder:
        env = {**RAY_ENV, **UV_ENV, "RAY_TMPDIR": folder, **env}
        session.run(python, "-m", "pytest", *arguments, env=env, external=True, success_codes=[0, 5])


def make_environment(session: nox.Session) -> str:
    """Make an empty environment in the session's, which has uv, and return its Python."""
    folder = make_folder(session, "environment")
    session.run("uv", "venv", "--quiet", "--clear", str(folder))
    return str(folder / "bin" / "python")


each_package = nox.parametrize("name", list(SIBLINGS), ids=list(SIBLINGS))


@nox.session
@each_package
def tests(session: nox.Session, name: str) -> None:
    """Run the tests of one package, with only its declared dependencies installed."""
    install(session, *map(package, [*SIBLINGS[name], name]), *test_requirements(name))
    run_tests(session, f"packages/{name}", *session.posargs)


@nox.session
def test(session: nox.Session) -> None:
    """Show that every package works on this machine: all unit tests, and the tests on Ray that are marked `smoke`.

    They share one environment, which has no torch.
    """
    install(session, *map(package, SIBLINGS), *all_test_requirements())
    units = [package(name, "/tests/unit") for name in SIBLINGS]
    run_tests(session, *TWO_PROCESSES, "-m", "not nightly", *units, *session.posargs)
    run_tests(session, *TWO_PROCESSES, "-m", "smoke", *find_smoke_tests(), *session.posargs)


def find_smoke_tests() -> list[str]:
    """Return the files of tests on Ray of which some are marked `smoke`."""
    marked = [*ROOT.glob("packages/*/tests/*/test_*.py"), *ROOT.glob("integration-tests/test_*.py")]
    return [str(path.relative_to(ROOT)) for path in sorted(marked) if "mark.smoke" in path.read_text("utf-8")]


def install_wheels(session: nox.Session) -> Path:
    """Install the wheels of all packages with what their tests need; return a folder with only those tests."""
    install(session, "hatchling", "torch", "scikit-learn", *all_test_requirements())
    wheels = build_wheels(session, *SIBLINGS)
    extras = {"workergroup": "[torch]"}
    install(session, *(f"fairlead-{name}{extras.get(name, '')} @ {path.as_uri()}" for name, path in wheels.items()))
    return copy_tests(session, *SIBLINGS)


# What files of unit tests say of which some need torch, which the session `test` lacks.
NEEDS_TORCH = re.compile(r"needs torch|skip.*torch|importorskip\(\w+\)")


@nox.session
def ray(session: nox.Session) -> None:
    """Test all packages from their wheels on Ray, with torch and without sources at hand, in two processes.

    It leaves out what `test` runs, and what `nightly` runs. `nox -s ray -- packages/venvs` tests one package, and
    `nox -s ray -- --record-seconds=$PWD/test-seconds.json` records which files take longest.
    """
    here = install_wheels(session)
    # The sessions `seams` and `verl` run the tests against other frameworks.
    folders = [path for path in here.glob("packages/*/tests/*") if path.name in ("ray", "uv", "interop", "simulation")]
    units = here.glob("packages/*/tests/unit/test_*.py")
    units = [path for path in units if NEEDS_TORCH.search(path.read_text(encoding="utf-8"))]
    options = ["-m", "not smoke and not nightly", *TWO_PROCESSES, *session.posargs]
    with session.chdir(here):
        # Unit tests run in processes that have not used Ray.
        for paths in ([],) if any(Path(one).exists() for one in session.posargs) else (units, folders):
            run_tests(session, *options, *(str(path.relative_to(here)) for path in sorted(paths)))


@nox.session
def wheels(session: nox.Session) -> None:
    """Install each package by name from a local index of all wheels, import its modules, and run its README's example.

    `nox -s wheels -- placement` does that with one package, and `-- --index FOLDER` with the wheels of a folder.
    """
    install(session, "hatchling", "uv")
    given, *names = session.posargs or [""]
    if given == "--index":
        built, names = [*Path(names[0]).resolve().glob("*.whl")], names[1:]
    else:
        built, names = [*build_wheels(session, *SIBLINGS).values()], session.posargs
    index = make_index(session, built)
    for name in names or SIBLINGS:
        python = make_environment(session)
        folder = Path(python).parent.parent
        command = ["uv", "pip", "install", "--quiet", "--python", python, "--index", index, "-c", "constraints.txt"]
        # uv may have wheels of this version from an earlier run of the session.
        fresh = [f"--refresh-package=fairlead-{one}" for one in SIBLINGS]
        session.run(*command, *fresh, f"fairlead-{name}", env=INSTALL_ENV)
        (folder / "example.py").write_text(read_blocks(f"packages/{name}/README.md", "python")[0], encoding="utf-8")
        own = {**RAY_ENV, **UV_ENV, "FAIRLEAD_VENV_DIR": str(folder / "venvs")}
        with session.chdir(folder):
            session.run(python, str(ROOT / "scripts/import_all.py"), import_name(name), external=True)
            session.run(python, "example.py", env=own, external=True)


@nox.session
@each_package
def minimums(session: nox.Session, name: str) -> None:
    """Run the tests of one package with the lowest versions that it and its siblings declare."""
    install(session, "uv")
    python = make_environment(session)
    closure = [*SIBLINGS[name], name]
    uv = ["uv", "pip", "install", "--python", python]
    declared = [part for one in closure for part in ("-r", f"packages/{one}/pyproject.toml")]
    session.run(*uv, "--resolution=lowest-direct", *declared, *map(package, closure), env=INSTALL_ENV)
    # Only what tests are run with is constrained: the rest keeps its lowest version.
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    tools = [line.partition(" ")[0] for line in pins if line.partition("==")[0] in PYTEST]
    session.run(*uv, *tools, *test_requirements(name), env=INSTALL_ENV)
    with session.chdir(copy_tests(session, name)):
        run_tests(session, "packages", "-m", "not nightly", *session.posargs, python=python)


@nox.session
def canary(session: nox.Session) -> None:
    """Test the use of private parts of Ray against the newest Ray, and against a pre-release if there is one. Nightly.

    Then the tests that are marked `smoke` show that every package works on it.
    """
    install(session, *map(package, SIBLINGS), *all_test_requirements())
    private = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/tests/**/test_ray_private.py"))
    tried = set()
    for options in ([], ["--pre"]):
        # Without the constraints, which pin Ray.
        session.install("--upgrade", *options, "ray", env=UV_ENV, silent=False)
        version = session.run("python", "-c", "import ray; print(ray.__version__)", silent=True)
        if version not in tried:
            tried.add(version)
            run_tests(session, *private, "--timeout=1200", *session.posargs, FAIRLEAD_ROUNDS="200")
            run_tests(session, *TWO_PROCESSES, "-m", "smoke", *find_smoke_tests(), *session.posargs)
    session.log(f"tested with Ray {', '.join(sorted(one.strip() for one in tried))}")


@nox.session
def coverage(session: nox.Session) -> None:
    """Measure which part of each package its unit tests and its tests on Ray run, and print a table. Nightly.

    `nox -s coverage -- placement` measures one package. What a process does that is killed is not counted.
    """
    names = session.posargs or list(SIBLINGS)
    install(session, *map(package, SIBLINGS), "torch", *all_test_requirements(), *group("coverage"))
    data = str(make_folder(session, "coverage") / "data")
    tests = [f"packages/{name}/tests/{kind}" for name in names for kind in ("unit", "ray")]
    tests = [folder for folder in tests if (ROOT / folder).is_dir()]
    options = ["-m", "not nightly", *TWO_PROCESSES, *(f"--cov={import_name(name)}" for name in names), "--cov-report="]
    run_tests(session, *options, *tests, COVERAGE_FILE=data)
    rows = ["| package | lines that tests run |", "|---|---|"]
    for name in names:
        report = ["coverage", "report", f"--include=*/{import_name(name)}/*", "--format=total"]
        rows.append(f"| {name} | {session.run(*report, silent=True, env={'COVERAGE_FILE': data}).strip()} % |")
    session.log("\n" + "\n".join(rows))
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write("\n".join(rows) + "\n")


@nox.session
def integration(session: nox.Session) -> None:
    """Test several packages together, on a real local Ray, and each call of the original systems in its form."""
    # The planted hangs meet in torch.
    install(session, *map(package, SIBLINGS), "torch", "jsonschema", *PYTEST)
    # Planted hangs wait more than they compute, so that two cores serve three processes.
    options = [f"--ignore={MULTIHOST}", "-m", "not smoke and not nightly", *TWO_PROCESSES, "--numprocesses=3"]
    run_tests(session, "integration-tests", *options, *session.posargs)


@nox.session
def multihost(session: nox.Session) -> None:
    """Test several hosts, each a network namespace of this machine, which needs root."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        session.skip("network namespaces need root, and the program ip (iproute2)")
    install(session, *map(package, SIBLINGS), "torch", *PYTEST)
    # In one process: the hosts of several clusters would need more than two cores.
    run_tests(session, *(session.posargs or [MULTIHOST, "-m", "not nightly"]))


# What a night repeats more often than `ci`.
OFTEN = {"FAIRLEAD_LOOKS": "100", "FAIRLEAD_PAIRS": "10000", "FAIRLEAD_RUNS": "5", "FAIRLEAD_TRUTH": "2"}
# The names that files of tests on several hosts have after packages. Those with other names belong to workergroup.
FIRST_WORDS = {name.partition("-")[0]: name for name in SIBLINGS}


@nox.session
def nightly(session: nox.Session) -> None:
    """Run what `ci` leaves out: faults, soaks, planted hangs, hosts, other frameworks, and the other examples.

    `nox -s nightly -- workergroup` runs the faults of one package, its hosts included.
    """
    names = set(session.posargs or SIBLINGS)
    if unknown := names - SIBLINGS.keys():
        session.error(f"there is no package {', '.join(sorted(unknown))}; there are {', '.join(SIBLINGS)}")
    files = [path.relative_to(ROOT) for path in sorted(ROOT.glob(f"{MULTIHOST}/test_*.py"))]
    hosts = [str(file) for file in files if FIRST_WORDS.get(file.stem.split("_")[1], "workergroup") in names]
    options = ["-m", "nightly and not smoke", "--timeout=1800"]
    if hosts:
        session.notify("multihost", posargs=[*options, *hosts])
    if names & {"rollouts", "transfer"}:
        session.notify("seams", posargs=[])
    if names & {"transfer", "verl"}:
        session.notify("verl", posargs=[] if "verl" in names else ["hosts"])
    if not session.posargs:
        session.notify("examples", posargs=["all"])
        session.notify("hardware", posargs=["--rehearse"])
    here = install_wheels(session)
    if "inspect" in names:
        install(session, *group("libraries"))
    shutil.copytree(ROOT / PLANTED, here / PLANTED)
    tests = [*(f"packages/{name}" for name in sorted(names)), *[PLANTED] * ("inspect" in names)]
    with session.chdir(here):
        run_tests(session, *options, *TWO_PROCESSES, *tests, **OFTEN)


@nox.session
def hang(session: nox.Session) -> None:
    """Let `why` judge jobs that hang, and print a table: `-- planted`, `-- libraries` (all, or one by name), `-- gpu`.

    A case takes about 30 seconds, and a program around a library two minutes: 40 of them take more than an hour.
    """
    kind, *names = session.posargs or ["planted"]
    if kind not in ("planted", "libraries", "gpu"):
        session.error(f"there are no hangs called {kind!r}; there are planted, libraries and gpu")
    install(session, *map(package, [*SIBLINGS["inspect"], "inspect"]), "torch", *PYTEST, *group("libraries"))
    if kind == "libraries":
        file, env = f"{PLANTED}/test_libraries.py", {"FAIRLEAD_LIBRARIES": names[0] if names else "all"}
    else:
        file, env = f"{PLANTED}/test_truth.py", {"FAIRLEAD_TRUTH": "10"} if kind == "planted" else {}
    options = ["-k", "gpu"] if kind == "gpu" else []
    run_tests(session, file, "-s", "-m", "nightly or not nightly", "--timeout=1800", *options, **env)


@nox.session
def demo(session: nox.Session) -> None:
    """Train a data- and tensor-parallel classifier with numpy; see `examples` for others."""
    install(session, *map(package, [*SIBLINGS["workergroup"], "workergroup"]), "scikit-learn")
    session.run("python", "examples/train_digits.py", *session.posargs, env=EXAMPLE_ENV)


# The scripts of the examples with the options that shorten them. `ci` runs the first three.
EXAMPLES = {
    "ddp": ("ddp.py",),
    "colocated": ("colocated.py",),
    "async_ledger": ("async_ledger.py",),
    "grpo": ("grpo.py", "--steps", "5"),
    "hang": ("hung_job.py", "--why"),
    "hang_train": ("hung_ray_train.py", "--why"),
    "tpu_psum": ("tpu_psum.py",),
}


@nox.session
def examples(session: nox.Session) -> None:
    """Run the three short examples; `nox -s examples -- all` runs the others, shortened.

    `nox -s examples -- grpo --steps 20` runs one with your options.
    """
    known = list(EXAMPLES)
    name, *options = session.posargs or [""]
    chosen = {"": known[:3], "all": known[3:]}.get(name, [name])
    if unknown := set(chosen) - EXAMPLES.keys():
        session.error(f"there is no example {', '.join(unknown)}; there are {', '.join(known)}")
    needed = group("examples") if name else ("torch",)
    install(session, *map(package, SIBLINGS), *needed)
    for script, *shortened in (EXAMPLES[one] for one in chosen):
        session.run("python", f"examples/{script}", *(shortened if name in ("", "all") else options), env=EXAMPLE_ENV)


@nox.session
def verl(session: nox.Session) -> None:
    """Run verl's own tests on Fairlead and on verl's own groups, on CPUs; `nox -s verl -- sft` runs a trainer instead.

    They are the tests of its worker groups, in its distribution; `--source PATH` takes them, and verl, from a checkout.
    Trainers are `sft`, `grpo` and `kill`, which loses a worker. `hosts` only sends weights with checkpoint engines.
    """
    groups = map(package, [*SIBLINGS["verl"], "verl", *SIBLINGS["inspect"], "inspect", "transfer"])
    session.install("-c", "constraints-verl.txt", *group("verl"), *groups, env=INSTALL_ENV)
    if session.posargs in ([], ["hosts"]):
        run_tests(session, f"{MULTIHOST}/test_transfer_verl.py", "-m", "nightly")
    if session.posargs == ["hosts"]:
        return
    given = [str(Path(one).resolve()) if Path(one).is_dir() else one for one in session.posargs]
    with session.chdir(make_folder(session, "logs")):
        session.run("python", str(ROOT / "packages/verl/tests/compare.py"), *given, env=RAY_ENV)


@nox.session
def seams(session: nox.Session) -> None:
    """Test the adapters for other frameworks against the frameworks' own classes, without the rest of the frameworks.

    verl comes from the package index. `nox -s seams -- --source FOLDER` tests those of the checkouts in a folder too.
    """
    session.install("--no-deps", "-c", "constraints-verl.txt", "verl", env=UV_ENV)
    paths = map(package, [*SIBLINGS["transfer"], "transfer", "rollouts"])
    needed = "omegaconf", "pydantic", "ray", "tensordict", "torch", "transformers"
    session.install("-c", "constraints-verl.txt", *needed, "pytest", "pytest-timeout", *paths, env=INSTALL_ENV)
    given = session.posargs
    source, more = (given[1], given[2:]) if given[:1] == ["--source"] else ("", given)
    env = {"FAIRLEAD_SEAM_SOURCES": str(Path(source).resolve())} if source else {}
    run_tests(session, *(package(name, "/tests/seams") for name in ("rollouts", "transfer")), *more, **env)


# The lock names the public index, whatever else uv is configured to search on this machine.
NO_INDEX = dict.fromkeys(("UV_FIND_LINKS", "UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL"))


@nox.session
def lock(session: nox.Session) -> None:
    """Bring uv.lock up to date with the pyproject files, and export the constraints from it.

    Options are those of `uv lock`: `nox -s lock -- --upgrade-package ruff` raises one version.
    """
    session.install("uv")
    session.run("uv", "lock", "--no-config", *session.posargs, env={**UV_ENV, **NO_INDEX})
    for file, text in export_constraints(session).items():
        (ROOT / file).write_text(text, encoding="utf-8")


@nox.session
def lint(session: nox.Session) -> None:
    """Check formatting, the rules of ruff, which module may import which, the workflows, and the texts."""
    install(session, *group("lint"))
    # A lock that the pyproject files no longer agree with, and constraints that are not those of the lock.
    session.run("uv", "lock", "--check", "--offline", env=NO_INDEX, silent=True)
    exported = export_constraints(session)
    if stale := [file for file, text in exported.items() if (ROOT / file).read_text(encoding="utf-8") != text]:
        session.error(f"{' and '.join(stale)} differ from uv.lock: run `nox -s lock`")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    sources = os.pathsep.join(str(ROOT / "packages" / name / "src") for name in SIBLINGS)
    session.run("lint-imports", "--no-cache", "--no-logo", env={"PYTHONPATH": sources})
    session.run("actionlint")
    session.run("zizmor", "--offline", "--persona=auditor", ".github/workflows")
    session.run("pytest", "checks", "docs/test_prose.py", *session.posargs)


@nox.session
def typecheck(session: nox.Session) -> None:
    """Check types: mypy over every package, mypy and pyright over programs that use them."""
    install(session, *group("types"), *map(package, SIBLINGS))
    session.run("mypy", *(f"packages/{name}/src" for name in SIBLINGS), "typing_tests", "benchmarks")
    session.run("pyright", "typing_tests")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation (build/site/index.html), warnings as errors, and run its examples."""
    install(session, *map(package, SIBLINGS), "torch", *group("docs"), *PYTEST)
    session.run("sphinx-build", "-E", "--fail-on-warning", "--keep-going", "-q", "-c", "docs", ".", "build/site")
    run_tests(session, "docs/test_site.py", "docs/test_pages.py", *session.posargs)


@nox.session
def release(session: nox.Session) -> None:
    """Build and check the wheel and the sdist of every package, and check that all its public names have types."""
    install(session, *group("release"), *map(package, SIBLINGS))
    out = make_folder(session, "dist")
    for name in SIBLINGS:
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(out), package(name), silent=True)
    session.run("twine", "check", "--strict", *map(str, out.iterdir()))
    for name in SIBLINGS:
        # It fails below 100 %. Its output is shown only then.
        session.run("pyright", "--verifytypes", import_name(name), "--ignoreexternal", silent=True)


@nox.session
def vendor(session: nox.Session) -> None:
    """Copy fairlead-sharding into another project as its guide says, and run that project's tests and its own."""
    install(session, "hatchling", "pip", "numpy", *test_requirements("sharding"))
    (copy,) = read_blocks("docs/guides/sharding.md", "sh")
    project = make_folder(session, "project")
    shutil.copytree(ROOT / "examples" / "vendored", project, dirs_exist_ok=True)
    (project / "src" / "halo" / "_vendor").mkdir()
    session.run("sh", "-euc", copy.replace("host/", f"{project}/src/halo/"), external=True)
    # Installed from a wheel, to see that the wheel contains the copy.
    session.install("--no-build-isolation", "--no-deps", "--force-reinstall", str(project))
    session.run("pytest", str(project / "tests"))
    with session.chdir(copy_tests(session, "sharding")):
        session.run("pytest", "packages", *session.posargs, env={"SHARDING_UNDER_TEST": "halo._vendor.sharding"})


@nox.session
def bench(session: nox.Session) -> None:
    """Measure speed as ratios against hand-written Ray in the same run; `nox -s bench -- peers` against verl too."""
    if session.posargs == ["peers"]:
        session.install("-c", "constraints-verl.txt", *group("verl"), *map(package, SIBLINGS), env=INSTALL_ENV)
    else:
        install(session, *map(package, SIBLINGS), "torch")
    session.run("python", "benchmarks/run.py", *session.posargs, env=EXAMPLE_ENV)


@nox.session
def hardware(session: nox.Session) -> None:
    """Try GPUs, TPUs and several machines, as far as they are there, and print a report to paste into an issue.

    `RAY_ADDRESS=auto nox -s hardware` uses the cluster of this machine, `nox -s hardware -- --rehearse` only CPUs.
    """
    has_tpus = any(Path("/dev").glob("accel*")) or any(Path("/dev/vfio").glob("[0-9]*"))
    install(session, *map(package, SIBLINGS), "torch", *["jax[tpu]"] * has_tpus)
    session.run("python", "scripts/hardware.py", *session.posargs, env=EXAMPLE_ENV)


@nox.session
def pictures(session: nox.Session) -> None:
    """Draw the pictures of the READMEs and of three guides with the code that they show."""
    install(session, *map(package, SIBLINGS), "torch", "ray[train]")
    for script in ("grid", "inspect", "rollouts"):
        session.run("python", f"docs/draw_{script}.py", env=RAY_ENV)


# What `ci` adds to `nox`, one step after the other: two test processes, then two lists of sessions side by side.
CI = (["ray", "integration"],), (["multihost", "typecheck", "demo", "examples", "vendor"], ["docs", "wheels"])


@nox.session(venv_backend="none")
def ci(session: nox.Session) -> None:
    """Run what a change has to pass beside `nox`. Each list of sessions ends with their results and times."""

    def run(names: list[str]) -> int:
        return subprocess.run([sys.executable, "-m", "nox", "-s", *names], check=False).returncode

    with ThreadPoolExecutor() as pool:
        codes = [code for lists in CI for code in pool.map(run, lists)]
    if any(codes):
        session.error("a session has failed: see the results above")
