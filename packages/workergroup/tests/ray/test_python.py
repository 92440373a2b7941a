# SPDX-License-Identifier: Apache-2.0
"""Workers in another Python, which has Ray and the user's class, and nothing of Fairlead."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import ray

from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, WorkerStartError

ONLY_THERE = '''
import importlib.util
import os
import sys


class Worker:
    """Lives only in that environment."""

    def __init__(self, start):
        self.start = start

    def gen(self, n):
        for i in range(n):
            yield self.start + i

    def facts(self):
        ours = [n for n in ("fairlead_workergroup", "numpy", "rich") if importlib.util.find_spec(n)]
        return sys.prefix, ours, os.environ["VIRTUAL_ENV"], os.environ["RANK"]

    def fail(self):
        raise OnlyThere("text")


class OnlyThere(Exception):
    pass
'''


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A virtual environment with Ray alone, and a module that only it has."""
    venv = tmp_path_factory.mktemp("other") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=60)
    python = venv / "bin" / "python"
    # Only a few of Ray's modules are imported, so only these are compiled.
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile"]
    done = subprocess.run([*install, f"ray=={ray.__version__}"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    site = Path(sysconfig.get_path("purelib", vars={"base": str(venv)}))
    (site / "only_there.py").write_text(ONLY_THERE)
    return str(python)


@pytest.mark.timeout(600)
def test_class_of_another_python(other_python, cluster):
    """The driver cannot import the class; workers run it by its full name, and its generator streams."""
    with pytest.raises(ImportError):
        import only_there  # noqa: F401
    builder = RayWorkerBuilder("only_there.Worker", 5)
    with RayWorkerGroup(cluster, builder, workers_per_node=2, python=other_python) as group:
        assert [ray.get(ref) for ref in group.workers[0].gen.remote(3)] == [5, 6, 7]
        prefix = str(Path(other_python).parent.parent)
        facts = group.get_all_worker_results(group.run_all_workers_single_data("facts"))
        assert facts == [(prefix, [], prefix, "0"), (prefix, [], prefix, "1")]
        with pytest.raises(AttributeError, match=r"it has \['facts', 'fail', 'gen'\]"):
            group.run_all_workers_single_data("nothing")
        from fairlead_workergroup import RemoteError

        with pytest.raises(RemoteError, match=r"rank 1 raised only_there.OnlyThere: text"):
            group.get_all_worker_results([group.run_single_worker_single_data("fail", 1)])


def test_missing_python(cluster):
    """A path that does not exist is reported at once for each node; Ray itself would report it after minutes."""
    with pytest.raises(WorkerStartError, match=r"(?s)/nowhere/bin/python. cannot run the workers:.* on node "):
        RayWorkerGroup(cluster, "only_there.Worker", python="/nowhere/bin/python")
