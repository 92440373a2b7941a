# SPDX-License-Identifier: Apache-2.0
"""The lock file of libtpu, without Ray."""

import subprocess
import sys
import time

import pytest

from fairlead_tpu_executor._host import wait_for_lock

HOLD = "import fcntl, sys, time; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, 2); print(flush=True); time.sleep({})"


@pytest.fixture
def hold(tmp_path):
    """Return a file, and a function that locks it in another process, as libtpu does, for some seconds."""
    path, processes = tmp_path / "lock", []
    path.touch()

    def start(seconds):
        command = [sys.executable, "-c", HOLD.format(seconds), str(path)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert processes[-1].stdout.readline() == b"\n"
        return processes[-1]

    yield str(path), start
    for process in processes:
        process.kill()
        process.wait()


def test_a_lock_of_another_process(hold):
    """The error names the process, which goes on, and the file stays."""
    path, start = hold
    holder = start(600)
    with pytest.raises(RuntimeError, match=rf"already in use: process {holder.pid} \(.*fcntl.*\) has locked {path}"):
        wait_for_lock(path, 0.1)
    assert holder.poll() is None


def test_a_lock_that_is_released(hold):
    """It waits for the end of the process, and takes no lock itself."""
    path, start = hold
    start(0.5)
    wait_for_lock(path, 60.0)
    start(600)


def test_files_that_are_not_locked(tmp_path):
    """A path that does not exist, is a link or a folder, or is locked by nobody, does not delay a start."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    began = time.monotonic()
    for name in ("nothing", "file", "link", "."):
        wait_for_lock(str(tmp_path / name), 60.0)
    assert time.monotonic() - began < 30
    assert (tmp_path / "file").exists()
