# SPDX-License-Identifier: Apache-2.0
"""What the tests share: scripts in processes of their own, and waiting."""

import os
import subprocess
import sys
import textwrap
import time

import pytest
from hypothesis import settings

# No deadline: on a busy machine it would fail tests for being slow. No database: a test run leaves no files.
settings.register_profile("fairlead", max_examples=150, deadline=None, database=None)
settings.load_profile("fairlead")


class Script:
    """A Python script in a process of its own. It goes on past `input()` when `finish` is called."""

    def __init__(self, source, folder, env):
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", textwrap.dedent(source)],
            cwd=folder,
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self):
        """The next line it prints, or its errors if it prints no more."""
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=60)[1]
        return line.strip()

    def finish(self, *, check=True):
        """(stdout, stderr) of what is left."""
        out, err = self.process.communicate(input="\n", timeout=120)
        assert not check or self.process.returncode == 0, err
        return out, err


@pytest.fixture(scope="session")
def script_class():
    """For fixtures that live longer than a test."""
    return Script


@pytest.fixture
def start_script(tmp_path):
    """Starts scripts, and ends those that a test leaves running."""
    started = []

    def start(source, **env):
        started.append(Script(source, tmp_path, env))
        return started[-1]

    yield start
    for script in started:
        script.process.kill()
        script.process.communicate()


@pytest.fixture
def run_script(start_script):
    """Runs a script to its end and gives its output."""
    return lambda source, **env: start_script(source, **env).finish()[0]


@pytest.fixture
def eventually():
    """Waits until something holds, at most some seconds; says whether it came to hold."""

    def wait(holds, timeout_s=15.0):
        deadline = time.monotonic() + timeout_s
        while not (held := holds()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return bool(held)

    return wait
