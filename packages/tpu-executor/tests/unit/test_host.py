# SPDX-License-Identifier: Apache-2.0
"""The preparations of a host before it runs work, without Ray."""

import os
import subprocess
import sys
import tempfile
import uuid

import pytest

from fairlead_tpu_executor import _host
from fairlead_tpu_executor._host import clear_lock_file, hold, wait_for_end


@pytest.fixture
def shared_folder(monkeypatch):
    """Return a folder that every user can write to, as Ray's session folder is, in the place of that folder."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        monkeypatch.setattr(_host, "session_folder", lambda: folder)
        yield folder


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


def test_one_process_at_a_time(shared_folder):
    """A process holds its host from its first line until the kernel has ended it, however it ends."""
    name = uuid.uuid4().hex
    assert wait_for_end([name], 0.1)
    env = {**os.environ, "TMPDIR": shared_folder}
    process = subprocess.Popen([sys.executable, "-c", HOLD, name], stdout=subprocess.PIPE, env=env)
    try:
        assert process.stdout.readline() == b"held\n"
        assert not wait_for_end([name], 0.1)
        process.kill()
        assert wait_for_end([name], 30.0)
    finally:
        process.kill()
        process.wait()
    os.close(hold(name, 30.0))


# What another user can do before our process comes: bind the name, occupy the folders, lock what they can open.
STRANGER = r"""if True:
    import fcntl, os, socket, sys
    name, folder, mine = sys.argv[1:]
    if os.geteuid() == 0:
        os.setuid(65534)
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0fairlead-tpu-{name}")
    os.mkdir(f"{folder}/fairlead-tpu-{mine}-0", 0o777)
    os.chmod(f"{folder}/fairlead-tpu-{mine}-0", 0o777)
    os.symlink("/tmp", f"{folder}/fairlead-tpu-{mine}-1")
    files = [open(os.path.join(folder, f"fairlead-tpu-{mine}-0", name), "w")]
    fcntl.flock(files[0], fcntl.LOCK_EX)
    print("occupied", flush=True)
    sys.stdin.readline()
    for at, folders, names in os.walk(folder):
        for each in (*folders, *names):
            try:
                files.append(os.open(os.path.join(at, each), os.O_RDONLY))
                fcntl.flock(files[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                pass
    print("locked", flush=True)
    sys.stdin.readline()
"""


def test_another_user_cannot_take_the_lock(shared_folder):
    """Another user of the machine can neither take a host's lock first, nor take it after us, so no start waits.

    Without the right to change the user, the other one is this user with a folder that is open to all.
    """
    name = uuid.uuid4().hex
    command = [sys.executable, "-c", STRANGER, name, shared_folder, str(os.geteuid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stranger:
        try:
            assert stranger.stdout.readline() == "occupied\n"
            os.close(hold(name, 0.1))
            if os.geteuid() == 0:
                stranger.stdin.write("\n")
                stranger.stdin.flush()
                assert stranger.stdout.readline() == "locked\n"
                os.close(hold(name, 0.1))
        finally:
            stranger.kill()


def test_locks_do_not_accumulate(shared_folder):
    """The lock of a process that has ended leaves no file after the next lock; that of a living one stays."""
    kept = hold("kept", 0.1)
    for number in range(3):
        os.close(hold(f"ended-{number}", 0.1))
    last = hold("last", 0.1)
    (folder,) = os.listdir(shared_folder)
    assert sorted(os.listdir(os.path.join(shared_folder, folder))) == ["kept", "last"]
    assert hold("kept", 0.1) is None
    for held in (kept, last):
        os.close(held)
