# SPDX-License-Identifier: Apache-2.0
"""Hosts and users that share a folder of environments."""

import contextlib
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fairlead_venvs import VenvBuildError, VenvSpec, create_local_venv, prune
from fairlead_venvs._build import store, users
from fairlead_venvs._build.publish import KernelLock
from fairlead_venvs._build.store import lock_path
from fairlead_venvs._build.users import USED, host_id, mark_used
from fairlead_venvs._build.uv import Deadline, Runner, Session
from fairlead_venvs._planning.plan import plan_venv
from fairlead_venvs._planning.wheel import ensure_wheel


def test_lock_of_a_forked_process(root):
    """A released lock is free, even while a forked process has its file open."""
    root.mkdir()
    ours, theirs = (KernelLock(root, lock_path(root / "venv")) for _ in range(2))
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


@pytest.mark.parametrize(
    ("mounts", "folder", "shared"),
    [
        ("server:/x /data nfs4 rw 0 0", "/data/venvs", True),
        ("server:/x /data nfs4 rw 0 0", "/database", False),
        ("systemd-1 /data autofs rw 0 0\nserver:/x /data nfs4 rw 0 0", "/data/venvs", True),
        ("server:/x /data nfs4 rw 0 0\n/dev/sdb /data/local ext4 rw 0 0", "/data/local/venvs", False),
        (r"server:/x /my\040data nfs4 rw 0 0", "/my data/venvs", True),
    ],
)
def test_shared_file_systems(monkeypatch, mounts, folder, shared):
    """The file system of a folder is the last one that is mounted on the nearest place, also one with a space."""
    monkeypatch.setattr(users, "_read_system", lambda path: f"/dev/sda / ext4 rw 0 0\n{mounts}\n")
    assert users.on_shared_file_system(folder) == shared


def test_hosts_of_one_name(monkeypatch):
    """Two containers of one name are two hosts; the machine itself is the same one after a reboot."""
    system = {users.PID_NAMESPACE: "pid:[4026532101]", "/proc/sys/kernel/random/boot_id": "1", "/etc/machine-id": "m"}
    monkeypatch.setattr(users, "_read_system", lambda path: system[path])
    container = host_id()
    system[users.PID_NAMESPACE] = "pid:[4026532202]"
    assert host_id() != container
    system[users.PID_NAMESPACE] = users.FIRST_PID_NAMESPACE
    machine = host_id()
    system["/proc/sys/kernel/random/boot_id"] = "2"
    assert host_id() == machine


@pytest.fixture(autouse=True)
def root(monkeypatch):
    """The folder of environments of this test, outside the folder that each start of pytest closes to other users."""
    with tempfile.TemporaryDirectory(prefix="venvs-") as folder:
        root = Path(folder, "venvs")
        monkeypatch.setenv("FAIRLEAD_VENV_DIR", str(root))
        yield root


@pytest.fixture
def as_user(root):
    """Run a function as another user of one group, and return its exception."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as two users")
    for folder in root.parents:
        if os.stat(folder).st_mode & 0o077 == 0:
            os.chmod(folder, os.stat(folder).st_mode | 0o011)

    def run(user, function, umask=0o022):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.umask(umask)
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


@pytest.fixture
def work(root, monkeypatch):
    """Return a function that makes everything in the folder, and returns which user made what it gets.

    The seam is the runner of uv: instead of uv, it writes files that name the user.
    """

    def uv(_, *arguments, cwd, **__):
        user = str(os.geteuid())
        if arguments[0] == "venv":
            env = Path(arguments[-1])
            (env / "lib" / "python3" / "site-packages").mkdir(parents=True)
            (env / "bin").mkdir()
            (env / "bin" / "python").write_text(user)
        elif arguments[:3] == ("pip", "install", "--python"):
            Path(arguments[3]).with_name("complete").write_text(user)
        elif arguments[:2] == ("pip", "compile"):
            (cwd / "pins.txt").write_text(f"alpha=={user}")
        elif arguments[0] == "build":
            with zipfile.ZipFile(
                Path(arguments[arguments.index("--out-dir") + 1], "proj-1-py3-none-any.whl"), "w"
            ) as new:
                new.writestr("user", user)

    def run(_, command, **__):
        prefix = str(Path(command[0]).parent.parent)
        return json.dumps([platform.python_version(), sys.implementation.name, prefix, None])

    monkeypatch.setattr(Runner, "uv", uv)
    monkeypatch.setattr(Runner, "run", run)
    project = root.parent / "project"
    project.mkdir()

    def make():
        (pin,) = plan_venv(VenvSpec(requirements=["alpha"])).recipe.requirements
        python = create_local_venv(VenvSpec(requirements=[]))
        wheel, _ = ensure_wheel(project, root=store.venv_root(), python="3", runner=Runner(Session(Deadline(60))))
        with zipfile.ZipFile(wheel) as archive:
            return {pin.partition("==")[2], Path(python).read_text(), archive.read("user").decode()}

    # Once here, as other users may not be able to read this Python's modules.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAIRLEAD_VENV_DIR", str(root.parent / "first"))
        assert make() == {"0"}
    return make


ANN, BOB = 4001, 4002


def make_folder(root, mode):
    root.mkdir()
    os.chown(root, 0, 4242)
    os.chmod(root, mode)


@pytest.mark.parametrize("mode", [0o1777, 0o3775])
def test_two_users_of_one_cache(root, as_user, work, mode):
    """Of two users of a folder with the sticky bit, neither runs, can change or can block what the other made."""
    make_folder(root, mode)

    def make_own():
        assert work() == {str(os.geteuid())}

    def find_others():
        for folder, names, files in os.walk(root):
            for path in (os.path.join(folder, name) for name in [*names, *files]):
                own = os.lstat(path).st_uid == os.geteuid()
                assert own or os.path.islink(path) or not os.access(path, os.W_OK), path
                assert own or not path.endswith(".lock") or not os.access(path, os.R_OK), path

    for umask in (0o022, 0o002, 0):
        for user in (ANN, BOB):
            assert as_user(user, make_own, umask) == ""
    for user in (ANN, BOB):
        assert as_user(user, find_others) == ""
        assert as_user(user, lambda: prune(older_than=0)) == ""
    for user in (ANN, BOB):
        assert as_user(user, make_own) == ""


def test_no_sticky_bit(root, as_user, work):
    """A folder in which anybody may replace anything is refused, also for reading, with the command that repairs it."""
    make_folder(root, 0o777)

    def refuse():
        with pytest.raises(VenvBuildError, match=rf"`chmod \+t {root}`"):
            work()

    def make_own():
        assert work() == {str(os.geteuid())}

    assert as_user(ANN, refuse) == ""
    assert list(root.iterdir()) == []
    os.chmod(root, 0o1777)
    assert as_user(ANN, make_own) == ""
    os.chmod(root, 0o777)
    assert as_user(ANN, refuse) == ""


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("users", [(ANN, BOB), (BOB, ANN)])
def test_part_of_another_user(root, as_user, work, users, linked):
    """A user's part of a shared folder that another user has created first is refused, with its owner."""
    other, user = users
    make_folder(root, 0o1777)

    def plant():
        work()
        (made,) = root.iterdir()
        theirs = made.with_name(made.name.replace(str(other), str(user)))
        assert made != theirs
        if linked:
            theirs.symlink_to(made)
        else:
            made.rename(theirs)

    def refuse():
        with pytest.raises(VenvBuildError, match="is a link" if linked else f"belongs to user {other}"):
            work()

    assert as_user(other, plant) == ""
    assert as_user(user, refuse) == ""


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("planted", [".resolved", ".locks", ".wheels", "venv-*"])
@pytest.mark.parametrize("users", [(ANN, BOB), (BOB, ANN)])
def test_files_of_another_user(root, as_user, work, monkeypatch, users, planted, linked):
    """Pins, locks, wheels and environments of another user are refused, also in a folder that is not divided by user.

    A node's folder may have the sticky bit when that of the driver has not (seam: the choice of the user's part).
    """
    monkeypatch.setattr(store, "choose_root", lambda folder: folder)
    other, user = users
    make_folder(root, 0o1777)

    def plant():
        work()
        for path in set(root.iterdir()) - set(root.glob(planted)):
            shutil.rmtree(path)
        for path in root.glob(planted):
            if linked:
                path.rename(path.with_name(f"moved{path.name}"))
                path.symlink_to(f"moved{path.name}")

    def refuse():
        with pytest.raises(VenvBuildError, match="is a link" if linked else f"belongs to user {other}"):
            work()

    assert as_user(other, plant) == ""
    assert as_user(user, refuse) == ""


def test_blocked_by_another_user(root, as_user, work):
    """A user who may only read the folder cannot hold its locks, which would hold up every build to its deadline."""
    root.mkdir()
    os.chown(root, ANN, ANN)

    def take():
        (lock,) = (root / ".locks").iterdir()
        with pytest.raises(PermissionError):
            os.open(lock, os.O_RDONLY)

    assert as_user(ANN, work) == ""
    assert as_user(BOB, take) == ""


@pytest.mark.parametrize("umasks", [(0o022, 0o022), (0o027, 0o002)])
def test_two_users_share_a_folder(root, as_user, work, monkeypatch, umasks):
    """Two users of a group build, lock, mark and prune in one folder, whatever their umask; the folder says who may."""
    make_folder(root, 0o2775)

    def first():
        assert work() == {str(ANN)}

    def second():
        assert work() == {str(ANN)}
        (python,) = root.glob("venv-*/bin/python")
        os.utime(python.parent.parent / USED / host_id())
        for path in root.rglob("*.lock"):
            lock = KernelLock(root, path)
            assert lock.acquire()
            lock.release()
        monkeypatch.setattr(users, "host_id", lambda: "another_host")
        mark_used(python.parent.parent)
        assert (python.parent.parent / USED / "another_host").exists()

    def find_open():
        assert [str(path) for path in root.rglob("*") if path.lstat().st_mode & 0o002 and not path.is_symlink()] == []

    for _ in range(2):
        assert as_user(ANN, first, umasks[0]) == ""
        assert as_user(BOB, second, umasks[1]) == ""
    assert as_user(ANN, find_open) == ""
    (folder,) = root.glob("venv-*")
    os.chown(folder, ANN, ANN)
    os.chmod(folder, 0o700)
    assert as_user(BOB, lambda: prune(older_than=0)) == ""
    assert folder.exists()


BUILDERS_S = float(os.environ.get("FAIRLEAD_BUILDERS_S", "30"))


@pytest.mark.nightly
def test_builders_that_are_killed(root, as_user, work, monkeypatch):
    """While 8 builders of two users are killed at random moments, each uses complete environments of its own user."""
    make_folder(root, 0o1777)
    log = root.parent / "used"
    log.touch()
    log.chmod(0o666)
    chance = random.Random(7)
    write = Runner.uv

    def slow(*arguments, **options):
        write(*arguments, **options)
        time.sleep(0.02)

    monkeypatch.setattr(Runner, "uv", slow)
    end, over = time.monotonic() + BUILDERS_S, root.parent / "over"

    def build():
        own = random.Random()
        with log.open("a") as used:
            used.write(f"{os.getpid()} begins\n")
            used.flush()
            while not over.exists():
                spec = VenvSpec(requirements=["alpha"], setup=["true", str(own.randrange(5))])
                python = Path(create_local_venv(spec, force_rebuild=own.random() < 0.3, timeout_s=60))
                assert {python.read_text(), python.with_name("complete").read_text()} == {str(os.geteuid())}
                used.write(f"{os.geteuid()}\n")
                used.flush()

    with ThreadPoolExecutor(8) as pool:

        def keep_building(user):
            while not over.exists():
                assert as_user(user, build) == ""

        builders = [pool.submit(keep_building, user) for user in (ANN, BOB) * 4]
        used, kills = [], 0
        try:
            # A busy machine may need longer until something has happened.
            while time.monotonic() < end or not (kills and {str(ANN), str(BOB)} <= set(used)):
                assert time.monotonic() < end + 60, f"{len(used)} environments used, {kills} builders killed"
                time.sleep(0.3 if BUILDERS_S < 10 else 1.0)
                lines = log.read_text().splitlines()
                used = [line for line in lines if not line.endswith("begins")]
                pids = [int(line.split()[0]) for line in lines if line.endswith("begins")]
                if alive := [pid for pid in pids[-8:] if os.path.exists(f"/proc/{pid}")]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(chance.choice(alive), signal.SIGKILL)
                        kills += 1
        finally:
            over.touch()
        for builder in builders:
            builder.result()
    sys.stdout.write(f"{len(used)} environments used, {kills} builders killed\n")
