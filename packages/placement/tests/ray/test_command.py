# SPDX-License-Identifier: Apache-2.0
"""The command line against a real cluster, in a process of its own."""

import os
import signal
import subprocess
import sys
import time

import pytest
import ray

from fairlead_placement import RayVirtualCluster


def run(*arguments, **env):
    command = [sys.executable, "-m", "fairlead_placement", *arguments]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def address(raylets):
    """A cluster of two nodes, of which one has two GPUs and the other one has one."""
    with raylets({"num_cpus": 2, "num_gpus": 2}, [{"num_cpus": 2, "num_gpus": 1}], logging_level="warning"):
        yield ray.get_runtime_context().gcs_address


def test_nodes(address):
    """`nodes` shows what is free and who holds the rest, as a table."""
    with RayVirtualCluster([2], name="held"):
        table = run("nodes", "--address", address)
        assert (table.returncode, table.stderr) == (0, "")
        assert "placement group held" in table.stdout


def test_no_cluster():
    """Without a cluster the error says what to do; there is no traceback, and no cluster is started."""
    done = run("nodes", "--address", "127.0.0.1:1")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("No Ray cluster answers at 127.0.0.1:1.")
    assert "Traceback" not in done.stderr


def test_interrupt(address):
    """Ctrl-C ends a command with 130 and without a traceback."""
    command = [sys.executable, "-m", "fairlead_placement", "nodes", "--address", address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    jobs = len(ray._private.state.jobs())
    while len(ray._private.state.jobs()) == jobs and process.poll() is None:
        time.sleep(0.02)  # until it has attached
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (130, 0, 1), errors  # it may have been done already
    assert "Traceback" not in errors
