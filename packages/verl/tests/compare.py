# SPDX-License-Identifier: Apache-2.0
"""Run verl's tests of its worker groups on Fairlead and on verl's own groups, and compare; or run a trainer.

`nox -s verl` runs it, in an environment with verl. Run it in an empty folder, where it writes its logs.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
OWN = "tests.single_controller"  # the name of verl's tests of its worker groups


def main() -> None:
    """Run what the options name. The exit status is 1 if a test fails on Fairlead and not on verl's own groups."""
    options = argparse.ArgumentParser(prog="nox -s verl --")
    options.add_argument("what", choices=["tests", "sft", "grpo", "kill"], nargs="?", default="tests")
    options.add_argument("--source", type=Path, help="a checkout of verl, instead of the version in its constraints")
    given = options.parse_args()
    source = (given.source or find_verl()).resolve()
    if given.what != "tests":
        sys.exit(run_pytest(source, str(HERE / "trainers"), "-k", given.what))
    results: dict[str, dict[str, str]] = {}
    for name, choice in (("Fairlead", "1"), ("verl", "0")):
        began, log = time.monotonic(), Path(f"{name}.xml").resolve()
        tests = [str(source / "tests/single_controller"), str(HERE / "verl")]
        run_pytest(source, "--timeout=150", f"--junitxml={log}", *tests, FAIRLEAD_VERL=choice)
        results[name] = read_outcomes(log)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    if problem := compare(results["Fairlead"], results["verl"]):
        sys.exit(problem)


def find_verl() -> Path:
    """Return the folder that has verl and its tests, without importing it into this process."""
    inside = "import pathlib, verl; print(pathlib.Path(verl.__file__).parent.parent)"
    env = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "none"}
    done = subprocess.run([sys.executable, "-c", inside], env=env, check=True, stdout=subprocess.PIPE, text=True)
    return Path(done.stdout.splitlines()[-1])


def run_pytest(source: Path, *arguments: str, **env: str) -> int:
    """Run tests against a checkout or installation of verl, and return the exit status of pytest."""
    # Workers import the helpers and the tests too.
    path = os.pathsep.join(map(str, (HERE / "logical_gpus", HERE / "verl", HERE / "trainers", source)))
    options = ["-c", str(HERE.parents[2] / "pyproject.toml"), "--rootdir", str(source), "--import-mode=prepend"]
    options += ["-p", "fairlead_logical_gpus_pytest", "-p", "no:cacheprovider", "--asyncio-mode=auto", "--tb=short"]
    command = [sys.executable, "-m", "pytest", *options, "-W", "ignore", *arguments]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path, **env}, check=False).returncode


def compare(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """Print the outcome of each test on both kinds of groups, and return what is wrong, or nothing."""
    tests = list({**theirs, **ours})
    for test in tests:
        print(f"{ours.get(test, 'missing'):8} {theirs.get(test, 'missing'):8} {test}")
    own = [test for test in tests if test.startswith(OWN)]
    passed, passed_there = (sum(one.get(test) == "passed" for test in own) for one in (ours, theirs))
    print(f"of {len(own)} tests of verl pass with Fairlead {passed}, with its own groups {passed_there}")
    failed, failed_there = find_failed(tests, ours), find_failed(tests, theirs)
    # Those that need NCCL fail with both.
    if worse := [test for test in failed if test not in failed_there]:
        return f"only with Fairlead: {worse}"
    lost = [test for test in failed if test not in own]
    if lost or not passed:
        return f"with Fairlead, {passed} tests of verl passed, and tests of this package failed: {lost}"
    return ""


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


if __name__ == "__main__":
    main()
