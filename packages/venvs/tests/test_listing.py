# SPDX-License-Identifier: Apache-2.0
"""What is there, who uses it, and what may be removed."""

import datetime
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from fairlead_venvs import VenvSpec, _housekeeping, create_local_venv, list_venvs, prune
from fairlead_venvs._build import store
from fairlead_venvs._build.kernel_lock import KernelLock
from fairlead_venvs._build.store import BUILDING, MANIFEST, USED, host_id, host_tag, lock_path, mark_used, share_folder
from fairlead_venvs._cluster import renewal


@pytest.fixture
def age(root):
    """Lets every environment have been asked for some time ago, by one host or another."""

    def set_back(seconds, host=None):
        for manifest in root.glob(f"*/{MANIFEST}"):
            text = manifest.read_text()
            at = next(line for line in text.splitlines() if "built_at" in line)
            manifest.write_text(text.replace(at, f' "built_at": {time.time() - seconds},'))
            mark = manifest.parent / USED / (host or host_id())
            mark.touch()
            for one in mark.parent.iterdir():
                os.utime(one, (time.time() - seconds,) * 2)

    return set_back


def test_list(spec_of, make_project, project_spec):
    """Each with its content, its size, when it was last asked for and by whom, and who runs from it."""
    assert list_venvs() == []
    before = time.time()
    small = create_local_venv(VenvSpec(requirements=[]))
    python = create_local_venv(project_spec(make_project(more="[dependency-groups]\ndev = []\n"), groups=["dev"]))
    with subprocess.Popen([python, "-c", "print('up', flush=True); input()"], stdin=-1, stdout=-1) as running:
        assert running.stdout.readline() == b"up\n"
        project, other = list_venvs()
        running.communicate(b"\n", timeout=60)

    assert (project.python, other.python) == (python, small)
    assert project.about == "project proj +dev"
    assert project.pids == (running.pid,)
    assert other.pids == ()
    assert before <= project.used_at <= time.time()
    assert project.hosts == (host_id(),)
    assert project.ray is None
    assert project.size_bytes > other.size_bytes > 1000
    assert list_venvs(sizes=False)[0].size_bytes is None


def test_variable_counts_as_use(spec_of, age, root, tmp_path, monkeypatch):
    """A worker whose command line says nothing is seen by its VIRTUAL_ENV, also through a link, and is spared."""
    root.mkdir()
    (tmp_path / "link").symlink_to(root)
    monkeypatch.setenv("FAIRLEAD_VENV_DIR", str(tmp_path / "link"))
    folder = Path(create_local_venv(spec_of("alpha"))).parent.parent
    age(3600)
    with subprocess.Popen(["sleep", "600"], env={**os.environ, "VIRTUAL_ENV": str(folder)}) as sleeper:
        deadline = time.monotonic() + 30
        while not list_venvs()[0].pids and time.monotonic() < deadline:
            time.sleep(0.02)
        assert list_venvs()[0].pids == (sleeper.pid,)
        assert prune() == []
        sleeper.kill()
    assert [venv.path for venv in prune()] == [folder]
    assert not folder.exists()


def test_prune(spec_of, age, root):
    """What is in use, asked for a moment ago, being built, or to be kept stays; the rest goes, damaged ones too."""
    specs = [spec_of("alpha"), spec_of("beta"), spec_of("gamma"), spec_of("alpha", "gamma"), spec_of("alpha==1.0")]
    used, by_spec, by_name, locked, gone = (Path(create_local_venv(spec)).parent.parent for spec in specs)
    assert prune() == []
    damaged = root / "venv-0123456789ab"
    damaged.mkdir()
    (damaged / "pyvenv.cfg").touch()
    not_ours = root / "data-0123456789ab"
    not_ours.mkdir()
    os.utime(not_ours, (0, 0))
    age(3600)
    os.utime(damaged, (0, 0))
    assert prune(older_than=datetime.timedelta(hours=2)) == []
    lock = KernelLock(lock_path(locked))
    assert lock.acquire()
    with subprocess.Popen([used / "bin" / "python", "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1) as one:
        one.stdout.readline()
        assert gone in [venv.path for venv in prune(dry_run=True)]
        assert gone.exists()
        removed = prune(keep=[specs[1], by_name.name])
        one.communicate(b"\n", timeout=60)
    lock.release()

    assert [venv.path for venv in removed] == [gone]
    assert [path.exists() for path in (used, by_spec, by_name, locked, gone)] == [True, True, True, True, False]
    assert not damaged.exists()
    assert not_ours.exists()
    assert create_local_venv(specs[-1]) == str(gone / "bin" / "python")


def test_prune_beside_another(spec_of, age, root):
    """What another prune removes meanwhile is no error, and counts as removed by that one."""
    folders = [Path(create_local_venv(spec_of(name))).parent.parent for name in ("alpha", "gamma")]
    age(3600)
    elsewhere = []

    def kept():
        elsewhere.extend(prune())
        yield from ()

    assert prune(keep=kept()) == []
    assert sorted(venv.path for venv in elsewhere) == sorted(folders)


def test_lock_of_a_forked_process(root):
    """A lock that is given back is free, also while a process forked meanwhile still has the file open."""
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


def test_wheels_in_use_stay(make_project, project_spec, root):
    """The wheel of a project that was asked for of late is not removed, nor are the locks beside it."""
    spec = project_spec(make_project())
    spec.fingerprint()
    (store,) = (root / ".wheels").glob("[!.]*")
    for path in (store, root / ".wheels" / ".locks"):
        os.utime(path, (0, 0))
    spec.fingerprint()
    prune()
    assert store.exists()
    assert (root / ".wheels" / ".locks").exists()
    os.utime(store, (0, 0))
    prune()
    assert not store.exists()


def test_shared_folder(spec_of, age):
    """Where another host asks for environments, too, nothing goes unless it is said how long it was not asked for."""
    folder = Path(create_local_venv(spec_of("alpha"))).parent.parent
    age(3600, host="another-host")
    with pytest.raises(ValueError, match=r"by another-host.*older_than"):
        prune()
    with pytest.raises(ValueError, match="older_than must be a number of seconds"):
        prune(older_than=-1)
    with pytest.raises(TypeError, match="keep must hold"):
        prune(keep=[3], older_than=5)
    assert prune(older_than=7200) == []
    assert [venv.path for venv in prune(older_than=1800)] == [folder]


@pytest.fixture
def leftover(root):
    """Makes the folder of a build that began some seconds ago, by a process of this host or of another."""
    made = []

    def make(pid, age_s, tag=None, below="."):
        folder = root / below / f"venv-0123456789ab{BUILDING}{tag or host_tag()}-{pid}-{len(made):08x}"
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - age_s,) * 2)
        made.append(folder)
        return folder

    yield make
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("below", [".", ".wheels"])
def test_long_builds_stay(leftover, below):
    """A build that takes long keeps its folder while its process lives; what a dead process left goes."""
    with subprocess.Popen(["sleep", "600"]) as builder:
        # It started before its folder was made, as a builder does.
        running = leftover(builder.pid, -1, below=below)
        long_ago = leftover(builder.pid, 3600, below=below)
        elsewhere = leftover(1, 3600, tag="another-host_abcdef", below=below)
        abandoned = leftover(1, 2 * 86_400, tag="another-host_abcdef", below=below)
        prune(older_than=0)
        assert running.exists()
        # Its id is that of a process that is younger than the folder.
        assert not long_ago.exists()
        assert elsewhere.exists()
        assert not abandoned.exists()
        builder.kill()
    prune(older_than=0)
    assert not running.exists()


def test_leftovers_of_wheels_are_swept(make_project, project_spec, leftover):
    """What a killed build of any wheel has left is removed by the next build of a wheel."""
    with subprocess.Popen(["true"]) as builder:
        builder.wait()
    abandoned = leftover(builder.pid, 3600, below=".wheels")
    project_spec(make_project()).fingerprint()
    assert not abandoned.exists()


def test_keep_names_an_environment(spec_of, age):
    """A name in `keep` that matches nothing is refused before anything is removed; a spec need not be built."""
    folder = Path(create_local_venv(spec_of("alpha"))).parent.parent
    age(3600)
    with pytest.raises(ValueError, match=f"keep names no environment: typo. There are: {folder.name}"):
        prune(keep=["typo", folder.name])
    assert folder.exists()
    assert prune(keep=[spec_of("gamma"), folder.name[-12:]]) == []


def test_hosts_of_one_name(monkeypatch):
    """Two containers of one name are two hosts; the machine itself is the same one after a reboot."""
    system = {store.PID_NAMESPACE: "pid:[4026532101]", "/proc/sys/kernel/random/boot_id": "1", "/etc/machine-id": "m"}
    monkeypatch.setattr(store, "_system", lambda path: system[path])
    container = host_id()
    system[store.PID_NAMESPACE] = "pid:[4026532202]"
    assert host_id() != container
    system[store.PID_NAMESPACE] = store.FIRST_PID_NAMESPACE
    machine, until_reboot = host_id(), host_tag()
    system["/proc/sys/kernel/random/boot_id"] = "2"
    assert host_id() == machine
    assert host_tag() != until_reboot


@pytest.fixture
def as_user(tmp_path):
    """Runs a function as another user of one group, under umask 022; its exception if it raises one."""
    for folder in (tmp_path, *tmp_path.parents):
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
        monkeypatch.setattr(store, "host_id", lambda: "another_host")
        mark_used(folder)
        assert (folder / USED / "another_host").exists()

    assert as_user(4001, first) == ""
    assert as_user(4002, second) == ""
    os.chown(folder, 4001, 4001)
    os.chmod(folder, 0o700)
    assert as_user(4002, lambda: prune(older_than=0)) == ""
    assert folder.exists()


@pytest.fixture
def shared(spec_of, age):
    """An environment that another host has used, too, some time ago; its folder and the mark of this host."""
    folder = Path(create_local_venv(spec_of("alpha"))).parent.parent
    age(7200, host="another-host")
    return folder, folder / USED / host_id()


@pytest.fixture
def renewing(monkeypatch):
    """Marks are renewed five times a second, until the test is over."""
    monkeypatch.setattr(renewal, "RENEW_S", 0.2)
    monkeypatch.setattr(renewal, "LOOKS", 3)
    yield
    renewal._looks.clear()
    thread = renewal._thread
    if thread is not None:
        thread.join(30)
        assert not thread.is_alive()


def is_renewed(mark, within_s=30.0):
    deadline = time.monotonic() + within_s
    while time.time() - mark.stat().st_mtime > 3600 and time.monotonic() < deadline:
        time.sleep(0.02)
    return time.time() - mark.stat().st_mtime < 3600


def seen_by(monkeypatch, host):
    """Look as another host does: it does not see who runs here (seam: the table of processes)."""
    monkeypatch.setattr(_housekeeping, "host_id", lambda: host)
    monkeypatch.setattr(_housekeeping, "users_of", lambda folders: {os.path.realpath(one): () for one in folders})


@pytest.mark.usefixtures("renewing")
def test_use_is_renewed(spec_of, shared, age, monkeypatch):
    """What runs for longer than `older_than` is not removed by another host, as its mark is renewed while it runs."""
    folder, mark = shared
    with subprocess.Popen(["sleep", "600"], env={**os.environ, "VIRTUAL_ENV": str(folder)}) as sleeper:
        create_local_venv(spec_of("alpha"))  # from now on this process keeps it marked
        age(7200)
        assert is_renewed(mark)
        with monkeypatch.context() as patch:
            seen_by(patch, "another-host")
            assert prune(older_than=3600) == []
        sleeper.kill()
    # When nobody runs from it any more, it is forgotten, and so is the thread.
    deadline = time.monotonic() + 30
    while renewal._thread is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert renewal._thread is None
    age(7200)
    seen_by(monkeypatch, "another-host")
    assert [venv.path for venv in prune(older_than=3600)] == [folder]


def test_nothing_is_renewed_on_a_folder_of_one_host(spec_of):
    """There `prune` sees who runs, and no thread is needed."""
    create_local_venv(spec_of("alpha"))
    assert renewal._thread is None


def test_looking_renews(shared):
    """Whoever lists the environments on the host where one is in use marks it."""
    folder, mark = shared
    os.utime(mark, (time.time() - 7200,) * 2)
    with subprocess.Popen(["sleep", "600"], env={**os.environ, "VIRTUAL_ENV": str(folder)}) as sleeper:
        deadline = time.monotonic() + 30
        while not list_venvs(sizes=False)[0].pids and time.monotonic() < deadline:
            time.sleep(0.02)
        assert is_renewed(mark, 0)
        sleeper.kill()


def test_marks_of_others_are_spared(shared, monkeypatch):
    """What another host has marked in the last half hour stays, however little `older_than` asks for."""
    folder, mark = shared
    os.utime(mark, (time.time() - 1500,) * 2)
    seen_by(monkeypatch, "another-host")
    assert prune(older_than=0) == []
    os.utime(mark, (time.time() - 2000,) * 2)
    assert [venv.path for venv in prune(older_than=0)] == [folder]


def test_clocks_that_differ(spec_of, monkeypatch):
    """Ages are those of the file system's clock: one of this host that is ahead removes nothing that was just used."""
    folder = Path(create_local_venv(spec_of("alpha"))).parent.parent
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 36_000)
    assert prune(older_than=3600) == []
    # One that is behind marks what is used all the same.
    mark = folder / USED / host_id()
    os.utime(mark, (clock() - 7200,) * 2)
    monkeypatch.setattr(time, "time", lambda: clock() - 36_000)
    mark_used(folder)
    assert clock() - mark.stat().st_mtime < 60
