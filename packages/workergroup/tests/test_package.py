# SPDX-License-Identifier: Apache-2.0
"""The package as it is installed: its version, its examples, its errors."""

import doctest
import importlib
import importlib.metadata
import inspect
import pickle
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fairlead_workergroup
from fairlead_workergroup import (
    CallCancelledError,
    CallTimeoutError,
    LateWorker,
    RemoteError,
    WorkerFailure,
    WorkerFailureError,
    WorkerGroupError,
    WorkerStartError,
)

MODULES = sorted(module.name for module in pkgutil.iter_modules(fairlead_workergroup.__path__))


def test_version():
    """The literal version and the installed metadata agree."""
    assert fairlead_workergroup.__version__ == importlib.metadata.version("fairlead-workergroup")


def test_import_starts_nothing():
    """Importing does not start Ray, and loads no torch."""
    code = "import sys, fairlead_workergroup, ray; sys.exit(ray.is_initialized() or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_all_is_sorted():
    """Everything that is exported is there, and listed once."""
    names = fairlead_workergroup.__all__
    assert names == sorted(set(names))
    assert all(hasattr(fairlead_workergroup, name) for name in names)


@pytest.mark.parametrize("name", ["", *MODULES])
def test_examples(name):
    """The examples in docstrings work."""
    if name == "torch":
        pytest.importorskip("torch", reason="the torch helpers need torch")
    module = importlib.import_module(f"fairlead_workergroup.{name}".rstrip("."))
    assert doctest.testmod(module).failed == 0


PUBLIC = ["", *(name for name in MODULES if not name.startswith("_"))]


def exported(name):
    """What a public module exports, by name."""
    if name == "torch":
        pytest.importorskip("torch", reason="the torch helpers need torch")
    module = importlib.import_module(f"fairlead_workergroup.{name}".rstrip("."))
    return {one: getattr(module, one) for one in module.__all__}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_members_are_documented(name):
    """Each public member says what it is for."""
    members = exported(name)
    for owner in [one for one in members.values() if inspect.isclass(one)]:
        for attribute, member in inspect.getmembers(owner):
            if not attribute.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                members[f"{owner.__name__}.{attribute}"] = member
    assert [one for one, member in members.items() if not inspect.getdoc(member)] == []


def public_attributes(owner):
    """What a class annotates, and what its methods set."""
    own = [base for base in owner.__mro__ if base.__module__.startswith("fairlead")]
    annotated = {name for base in own for name in inspect.get_annotations(base)}
    stored = {
        name for base in own for name in re.findall(r"^ +self\.(\w+).* = ", inspect.getsource(base), re.MULTILINE)
    }
    return sorted(name for name in annotated | stored if not name.startswith("_"))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_attributes_are_described(name):
    """A class, a base of it, or what these refer to says of each attribute what it is: `name: what`."""
    members = exported(name)
    missing = {}
    for owner in [one for one in members.values() if inspect.isclass(one)]:
        bases = [base for base in owner.__mro__ if base.__module__.startswith("fairlead")]
        # What a dataclass says of itself when nobody else does is no description.
        said = "\n".join(
            base.__doc__ for base in bases if base.__doc__ and not base.__doc__.startswith(f"{base.__name__}(")
        )
        said += "\n".join(inspect.getdoc(members.get(other)) or "" for other in re.findall(r"`(\w+)`", said))
        undescribed = [
            attribute
            for attribute in public_attributes(owner)
            if not re.search(rf"(?<![\w.]){attribute}(, \w+)*(:|`)", said)
        ]
        if undescribed:
            missing[owner.__name__] = undescribed
    assert missing == {}


FAILURE = WorkerFailure(3, "killed", {"dp": 1}, "abcdef0123", 77, "it was killed")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (WorkerGroupError("text"), "text"),
        (
            WorkerFailureError((FAILURE,), "do this"),
            "1 worker(s) lost:\n  rank 3 (dp=1) on node abcdef01, pid 77: killed: it was killed\ndo this",
        ),
        (
            WorkerStartError("it failed", 2, {"dp": 0}, "abcdef0123", "Traceback", "others waited"),
            "rank 2 (dp=0) on node abcdef01: it failed\nothers waited\nTraceback",
        ),
        (
            CallTimeoutError("step", 2.5, 8, (LateWorker(3, {"dp": 1}, "abcdef0123", 77, "load", 1.25),)),
            (
                "1 of 8 workers have not finished 'step', called 2.5 s ago:\n"
                "  rank 3 (dp=1) on node abcdef01, pid 77: in 'load' for 1.2 s\n"
                "The call goes on: ask for its result again, or cancel it."
            ),
        ),
        (
            CallCancelledError("step", (1, 3)),
            "the call of 'step' was cancelled before rank(s) 1, 3 finished it",
        ),
        (
            WorkerFailureError((FAILURE,) * 2000, "do this"),
            "2000 worker(s) lost:"
            + "\n  rank 3 (dp=1) on node abcdef01, pid 77: killed: it was killed" * 16
            + "\n  and 1984 others\ndo this",
        ),
        (
            CallCancelledError("step", tuple(range(2000))),
            (
                "the call of 'step' was cancelled before rank(s) "
                "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 1984 others finished it"
            ),
        ),
        (RemoteError("pkg.Odd", "text", "Traceback", 4), "rank 4 raised pkg.Odd: text\nTraceback"),
    ],
)
def test_errors_pickle(error, text):
    """Each error survives pickling with its text."""
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), str(error)) == (type(error), text, text)
    assert isinstance(again, WorkerGroupError)


def test_readme(tmp_path):
    """The README's first example works as a script."""
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    script = tmp_path / "example.py"
    example = readme.split("```python\n")[1].split("```")[0]
    script.write_text(example.replace("init_ray(", 'init_ray(address="local", '))  # whatever else runs here
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "put 2 values" in done.stdout
