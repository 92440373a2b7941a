# SPDX-License-Identifier: Apache-2.0
"""Extensions that work, that cannot be imported, and that raise, without Ray."""

import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fairlead_workergroup._lifecycle.teardown import Teardown
from fairlead_workergroup._membership.roster import Roster
from fairlead_workergroup._observe import extensions
from fairlead_workergroup._observe.calls import ObservedCalls
from fairlead_workergroup._observe.extensions import extend
from fairlead_workergroup.spi import CallObserver, Notice


@pytest.fixture
def installed(monkeypatch):
    """Install entry points, given as functions that load them."""
    extensions.load_extensions.cache_clear()

    def install(**loads):
        entries = [SimpleNamespace(value=f"package:{name}", load=load) for name, load in loads.items()]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)

    yield install
    extensions.load_extensions.cache_clear()


def test_extensions(installed, caplog):
    """Each gets each group with its id; one that fails is reported once, and others go on."""
    seen, failed = [], []

    def miss():
        raise ImportError("no such module")

    def fail(group, group_id):
        failed.append(group)
        raise KeyError(group_id)

    installed(missing=miss, failing=lambda: fail, good=lambda: lambda *args: seen.append(args))
    groups = [object(), object()]
    for number, group in enumerate(groups):
        extend(group, f"id-{number}")
    assert seen == [(groups[0], "id-0"), (groups[1], "id-1")]
    assert failed == groups[:1]
    assert [record.getMessage() for record in caplog.records] == [
        "The extension package:missing of worker groups cannot be imported.",
        "The extension package:failing of worker groups failed. It is not used any more.",
    ]


def test_observer_that_fails(caplog):
    """An observer that raises is reported once and dropped; calls go on without it."""
    told = []

    class Failing(CallObserver):
        def begin(self, name, began, futures):
            told.append(name)
            return len(told)

        def end(self, numbers, *, failed=False):
            raise OSError("no memory")

    observed = ObservedCalls()
    assert observed.begin("nobody", 0.0, []) == 0
    observed.observe(Failing())
    with pytest.raises(ValueError, match="observed by"):
        observed.observe(Failing())
    assert observed.begin("step", 0.0, [object()]) == 1
    observed.explain(KeyError())  # which this observer leaves as it is
    observed.end([1])
    assert observed.begin("step", 0.0, [object()]) == 0
    observed.mark("rank 1 lost")
    assert told == ["step"]
    assert caplog.text.count("does not observe the calls of its group any more") == 1


def test_watchers_that_fail(caplog):
    """A listener that raises is reported and hears nothing more; one that cannot be closed does not stop a shutdown."""
    told = []

    def fail(argument):
        told.append(argument)
        raise KeyError(argument)

    roster = SimpleNamespace(watchers=[(fail, fail), (told.append, told.append)])
    notice = Notice("resized", -1, "resized from dp=2 to dp=3")
    for _ in range(2):
        Roster.report(roster, notice)
    assert told == [notice] * 3
    assert caplog.text.count("A listener failed at") == 1
    del told[:]
    roster = SimpleNamespace(
        watchers=[(fail, fail), (told.append, told.append)], begin_end=lambda: None, end=lambda: None
    )
    held = SimpleNamespace(roster=roster, give_back=lambda: None, join_threads=lambda: None, gave_all_back=True)
    membership = SimpleNamespace(gate=SimpleNamespace(wake=lambda: None), join=lambda deadline: True)
    assert Teardown(SimpleNamespace(resources=held, release=lambda: None), membership).run(None, 30.0, force=False)
    assert len(told) == 2
    assert "cannot be closed" in caplog.text


def test_where_the_commands_are():
    """`python -m fairlead_workergroup` names the package that has the commands, and fails."""
    done = subprocess.run([sys.executable, "-m", "fairlead_workergroup", "why"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "python -m fairlead_inspect" in done.stderr
