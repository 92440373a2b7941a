# SPDX-License-Identifier: Apache-2.0
"""The preparations of a host before it runs work, without Ray."""

import os
import subprocess
import sys
import uuid

from fairlead_tpu_executor._host import clear_lock_file, hold, wait_for_end


def test_lock_files_that_stay(tmp_path, monkeypatch):
    """Paths that do not exist, are not regular files, or cannot be opened are left alone, with a message."""
    assert clear_lock_file(str(tmp_path / "nothing")) == ""
    assert "not a regular file" in clear_lock_file(str(tmp_path))
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    (tmp_path / "target").touch()
    assert "not a regular file" in clear_lock_file(str(link))
    assert (tmp_path / "target").exists()

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    assert "belongs to somebody else" in clear_lock_file(str(tmp_path / "target"))


def test_stale_lock_file(tmp_path):
    """A file that no living process holds is removed."""
    path = tmp_path / "lock"
    path.touch()
    assert clear_lock_file(str(path)) == ""
    assert not path.exists()


HOLD = """if True:
    import sys, time
    from fairlead_tpu_executor._host import hold
    held = hold(sys.argv[1], 30.0)
    print("held", flush=True)
    time.sleep(600)
"""


def test_one_process_at_a_time():
    """A process holds its host from its first line until the kernel has ended it, however it ends."""
    name = uuid.uuid4().hex
    assert wait_for_end([name], 0.1)
    process = subprocess.Popen([sys.executable, "-c", HOLD, name], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"held\n"
        assert not wait_for_end([name], 0.1)
        process.kill()
        assert wait_for_end([name], 30.0)
    finally:
        process.kill()
        process.wait()
    held = hold(name, 30.0)
    assert held is not None
    held.close()
