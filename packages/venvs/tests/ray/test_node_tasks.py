# SPDX-License-Identifier: Apache-2.0
"""The functions that run on nodes need nothing of Fairlead there."""

import functools
import pickle
import subprocess
import sys
import textwrap
import threading
from dataclasses import asdict

import pytest
import ray

from fairlead_venvs import VenvBuildError, VenvError
from fairlead_venvs._build import node_task
from fairlead_venvs._build.recipe import this_platform
from fairlead_venvs._build.uv import Deadline
from fairlead_venvs._cluster.ensure import _make_builds
from fairlead_venvs._cluster.rpc import pickle_by_value
from fairlead_venvs._planning.plan import plan_venv

# A Python in which this package cannot be imported.
CALL = """
    import pickle, sys

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.startswith("fairlead"):
                raise ModuleNotFoundError(name)

    sys.meta_path.insert(0, Absent())
    function, arguments = pickle.load(sys.stdin.buffer)
    print(pickle.loads(function)(*arguments)[0])
"""


def call(function, arguments):
    """Run a function as a node does that lacks this package, and return the status that it answers."""
    return run(pickle.dumps((pickle_by_value(function), arguments)))


def run(shipped):
    command = [sys.executable, "-c", textwrap.dedent(CALL)]
    done = subprocess.run(command, input=shipped, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def test_queries(root):
    """A node that has only Ray and uv answers."""
    assert call(node_task.look_here, (str(root / "venv-0123456789ab"), "", this_platform())) == "absent"
    assert call(node_task.probe_here, (sys.executable, 60.0)) == "ready"
    assert call(node_task.probe_here, ("/nowhere/python", 60.0)) == "failed"


def test_changed_before_it_is_sent(spec_of, tools, tmp_path):
    """A wheel that is not the requested one any more is not sent to a node."""
    wheel = tools.make_wheel(tmp_path, "delta")
    plan = plan_venv(spec_of(str(wheel)))
    tools.make_wheel(tmp_path, "delta", files={"more.py": ""})
    with pytest.raises(VenvBuildError, match=f"{wheel} was changed meanwhile"):
        _make_builds(plan, ["node"], Deadline(60.0))


def test_build(spec_of):
    """Such a node builds an environment, and finds it."""
    recipe = plan_venv(spec_of()).recipe
    assert call(node_task.build_here, (asdict(recipe), [], 60.0)) == "ready"
    assert call(node_task.look_here, (recipe.folder, recipe.fingerprint, recipe.platform)) == "ready"


def test_another_thread_pickles():
    """Another thread that pickles in the middle of a task's pickling neither disturbs it nor is disturbed by it."""
    other = []

    class Middle:
        def __reduce__(self):
            def pickle_too():
                other.append(b"look_here" in pickle_by_value(node_task.look_here))
                other.append(ray.cloudpickle.dumps(VenvError))  # as a user's thread does

            thread = threading.Thread(target=pickle_too)
            thread.start()
            thread.join(60)
            return str, ()

    by_reference = ray.cloudpickle.dumps(VenvError)
    task = functools.partial(node_task.look_here, Middle())
    shipped = pickle.dumps((pickle_by_value(task), ("", this_platform())))
    assert other == [True, by_reference]
    assert run(shipped) == "absent"
