# SPDX-License-Identifier: Apache-2.0
"""Fixtures that the tests share: scripts in their own processes, and ports."""

import contextlib
import os
import socket
import subprocess
import sys
import textwrap

import pytest


class Script:
    """A Python script in its own process. Its `input()` returns when `finish` is called."""

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
        """Return the next line that it prints; fail with its errors if it prints no more."""
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=60)[1]
        return line.strip()

    def finish(self, *, check=True):
        """Return the rest of (stdout, stderr)."""
        out, err = self.process.communicate(input="\n", timeout=120)
        assert not check or self.process.returncode == 0, err
        return out, err


@pytest.fixture(scope="session")
def script_class():
    """Return the class, for fixtures that live longer than a test."""
    return Script


@pytest.fixture
def start_script(tmp_path):
    """Return a function that starts scripts. Those that a test leaves running are killed."""
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
    """Return a function that runs a script to its end and returns its output."""
    return lambda source, **env: start_script(source, **env).finish()[0]


@pytest.fixture(scope="session")
def bind():
    """Return a function that binds a port and listens, as a server does."""

    def listen(port, *, reuse=False):
        with contextlib.closing(socket.socket()) as server:
            if reuse:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("", port))
            server.listen()

    return listen
