# SPDX-License-Identifier: Apache-2.0
"""Hosts and users that share a folder of environments."""

import os
import tempfile
from pathlib import Path

import pytest

from fairlead_venvs import prune
from fairlead_venvs._build import users
from fairlead_venvs._build.publish import KernelLock
from fairlead_venvs._build.store import lock_path
from fairlead_venvs._build.users import USED, host_id, host_tag, mark_used, share_folder


def test_lock_of_a_forked_process(root):
    """A released lock is free, even while a forked process has its file open."""
    root.mkdir()
    ours, theirs = KernelLock(lock_path(root / "venv")), KernelLock(lock_path(root / "venv"))
    assert ours.acquire()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        os.close(reading)
        assert not theirs.acquire()
        ours.release()
        assert theirs.acquire()
        theirs.release()
    finally:
        os.close(writing)
        os.waitpid(child, 0)


def test_hosts_of_one_name(monkeypatch):
    """Two containers of one name are two hosts; the machine itself is the same one after a reboot."""
    system = {users.PID_NAMESPACE: "pid:[4026532101]", "/proc/sys/kernel/random/boot_id": "1", "/etc/machine-id": "m"}
    monkeypatch.setattr(users, "_read_system", lambda path: system[path])
    container = host_id()
    system[users.PID_NAMESPACE] = "pid:[4026532202]"
    assert host_id() != container
    system[users.PID_NAMESPACE] = users.FIRST_PID_NAMESPACE
    machine, until_reboot = host_id(), host_tag()
    system["/proc/sys/kernel/random/boot_id"] = "2"
    assert host_id() == machine
    assert host_tag() != until_reboot


@pytest.fixture(autouse=True)
def root(monkeypatch):
    """The folder of environments of this test, outside the folder that each start of pytest closes to other users."""
    with tempfile.TemporaryDirectory(prefix="venvs-") as folder:
        root = Path(folder, "venvs")
        monkeypatch.setenv("FAIRLEAD_VENV_DIR", str(root))
        yield root


@pytest.fixture
def as_user(root):
    """Run a function as another user of one group with umask 022, and return its exception."""
    for folder in root.parents:
        if os.stat(folder).st_mode & 0o077 == 0:
            os.chmod(folder, os.stat(folder).st_mode | 0o011)

    def run(user, function):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.umask(0o022)
                os.setgroups([4242])
                os.setgid(4242)
                os.setuid(user)
                function()
                said = ""
            except BaseException as error:  # noqa: BLE001  the parent reports it
                said = repr(error)
            os.write(writing, said.encode())
            os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        with os.fdopen(reading) as file:
            return file.read()

    return run


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
def test_two_users_share_a_folder(root, as_user, monkeypatch):
    """Two users of a group lock, mark and prune in one folder, whatever their umask; the folder says who may."""
    root.mkdir()
    os.chown(root, 0, 4242)
    os.chmod(root, 0o2775)
    folder = root / "venv-0123456789ab"

    def first():
        lock = KernelLock(lock_path(folder))
        assert lock.acquire()
        lock.release()
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").touch()
        share_folder(folder / USED)
        os.chmod(folder / USED, 0o2775)
        mark_used(folder)

    def second():
        lock = KernelLock(lock_path(folder))
        assert lock.acquire()
        lock.release()
        os.utime(folder / USED / host_id())
        monkeypatch.setattr(users, "host_id", lambda: "another_host")
        mark_used(folder)
        assert (folder / USED / "another_host").exists()

    assert as_user(4001, first) == ""
    assert as_user(4002, second) == ""
    os.chown(folder, 4001, 4001)
    os.chmod(folder, 0o700)
    assert as_user(4002, lambda: prune(older_than=0)) == ""
    assert folder.exists()
