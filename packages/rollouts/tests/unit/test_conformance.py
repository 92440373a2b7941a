# SPDX-License-Identifier: Apache-2.0
"""The ledger passes every case, and each case fails a buffer that has the flaw it was made for."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fairlead_rollouts.conformance import CASES, Case, Report, check

FOLDER = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("systems", FOLDER / "systems.py")
systems = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(systems)


def play(name, factory):
    report = check(factory, cases=tuple(case for case in CASES if case.name == name))
    return report.verdicts[0], str(report)


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_the_ledger_passes(name):
    """A system over the ledger loses nothing, doubles nothing, and keeps the bound."""
    verdict, text = play(name, systems.OverLedger)
    assert verdict.verdict == "passed", text


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_a_wrong_buffer_fails(name):
    """Each case finds the flaw that it is named after."""
    verdict, text = play(name, systems.WRONG[name])
    assert verdict.verdict == "failed", text


def test_capabilities():
    """A case that needs a capability is not applicable without it, and never passed."""

    class Plain(systems.OverLedger):
        capabilities = ()

    report = check(Plain)
    assert isinstance(report, Report)
    skipped = [one.case for one in report.verdicts if one.verdict == "not applicable"]
    assert skipped == ["one_step_prefetch", "resume_keeps_next_batch", "version_from_lost_branch"]
    assert report.failed == ()


def test_the_report_names_what_is_lost():
    """The report is a table with the prompts and the issue."""
    _, text = play("checkpoint_ahead_of_training", systems.LosesOpen)
    assert "lost (" in text
    assert "NeMo RL #3599" in text
    assert isinstance(CASES[0], Case)


def test_the_pytest_plugin():
    """`pytest -p fairlead_rollouts.conformance.plugin` runs a test for each case."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "fairlead_rollouts.conformance.plugin", "--pyargs", "fairlead_rollouts.conformance.suite"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])}
    options = {"capture_output": True, "text": True, "timeout": 120, "cwd": FOLDER, "env": env}
    good = subprocess.run([*command, "--system", "systems:OverLedger"], **options)
    assert f"{len(CASES)} passed" in good.stdout, good.stdout + good.stderr
    bad = subprocess.run([*command, "--system", "systems:LosesFinished"], **options)
    assert bad.returncode == 1
    assert "failed" in bad.stdout
