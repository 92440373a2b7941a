# SPDX-License-Identifier: Apache-2.0
"""Listing and removing environments."""

import datetime
import os
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fairlead_venvs import VenvSpec, _housekeeping, create_local_venv, list_venvs, prune
from fairlead_venvs._build import publish
from fairlead_venvs._build.build import ensure_venv
from fairlead_venvs._build.publish import BUILDING, KernelLock
from fairlead_venvs._build.store import MANIFEST, lock_path, venv_root
from fairlead_venvs._build.users import USED, host_id, mark_used
from fairlead_venvs._build.uv import Deadline, Session
from fairlead_venvs._planning.plan import plan_venv


@pytest.fixture
def age(root):
    """Set back the time of the last use of every environment, by one host or another."""

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
    """The list has the content, size, last use, hosts and processes of each environment."""
    assert list_venvs() == []
    before = time.time()
    small = create_local_venv(VenvSpec(requirements=[]))
    python = create_local_venv(project_spec(make_project(more="[dependency-groups]\ndev = []\n"), groups=["dev"]))
    with subprocess.Popen([python, "-c", "print('up', flush=True); input()"], stdin=-1, stdout=-1) as running:
        assert running.stdout.readline() == b"up\n"
        project, other = list_venvs()
        running.communicate(b"\n", timeout=60)

    assert (project.python, other.python) == (python, small)
    assert project.description == "project proj +dev"
    assert project.pids == (running.pid,)
    assert other.pids == ()
    assert before <= project.used_at <= time.time()
    assert project.hosts == (host_id(),)
    assert project.ray is None
    assert project.size_bytes > other.size_bytes > 1000
    assert list_venvs(sizes=False)[0].size_bytes is None


def test_variable_counts_as_use(spec_of, age, root, tmp_path, monkeypatch):
    """A worker is recognised by its VIRTUAL_ENV, also through a link, and keeps its environment."""
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
    """Environments that are in use, recent, being built or kept stay; others and damaged ones are removed."""
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
    lock = KernelLock(root, lock_path(locked))
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
    """An environment that another prune removes meanwhile is not an error, and is not returned."""
    folders = [Path(create_local_venv(spec_of(name))).parent.parent for name in ("alpha", "gamma")]
    age(3600)
    elsewhere = []

    def kept():
        elsewhere.extend(prune())
        yield from ()

    assert prune(keep=kept()) == []
    assert sorted(venv.path for venv in elsewhere) == sorted(folders)


def test_wheels_in_use_stay(make_project, project_spec, root):
    """The wheel of a recently used project is not removed, nor are the locks beside it."""
    spec = project_spec(make_project())
    spec.fingerprint()
    store = plan_venv(spec).files[-1][1].parent.parent
    for path in (store, root / ".wheels" / ".locks"):
        os.utime(path, (0, 0))
    spec.fingerprint()
    prune()
    assert store.exists()
    assert (root / ".wheels" / ".locks").exists()
    os.utime(store, (0, 0))
    prune()
    assert not store.exists()


def test_wheels_of_a_build_stay(make_project, project_spec):
    """The wheel of a project stays until its environment is built, however long that takes."""
    plan = plan_venv(project_spec(make_project()))
    store = plan.files[-1][1].parent.parent

    def files():
        os.utime(store, (time.time() - 3600,) * 2)
        prune(older_than=0)
        return plan.files

    ensure_venv(plan.recipe, files, Session(Deadline(60)))
    assert store.exists()
    prune(older_than=0)
    assert not store.exists()


def test_request_beside_prune(spec_of, age, monkeypatch):
    """An environment that is requested while `prune` looks for its processes stays."""
    python = create_local_venv(spec_of("alpha"))
    age(3600)
    calls, find = [], _housekeeping.find_users

    def find_slowly(folders):
        found = find(folders)
        calls.append(found)
        if len(calls) == 2:  # the first one is for the list
            assert create_local_venv(spec_of("alpha")) == python
            subprocess.run([python, "-c", ""], check=True, timeout=60)
        return found

    monkeypatch.setattr(_housekeeping, "find_users", find_slowly)
    assert prune() == []
    assert len(calls) == 2
    assert os.path.exists(python)


def test_shared_folder(spec_of, age):
    """On a folder that another host uses, `prune` requires `older_than`."""
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
    """Create the folder of a build that began some seconds ago."""
    made = []

    def make(name, age_s, below="."):
        folder = root / below / f"{name}{BUILDING}{len(made):08x}"
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - age_s,) * 2)
        made.append(folder)
        return folder

    yield make
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("below", [".", ".wheels"])
def test_long_builds_stay(leftover, root, below, monkeypatch):
    """A build keeps its folder while it holds its lock. Where locks do not decide, it keeps it for a day."""
    running, killed = leftover("one", 2 * 86_400, below), leftover("two", 60, below)
    lock = KernelLock(root, lock_path(root / below / "one"))
    assert lock.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(publish, "locks_decide", lambda root: False)
        young, old = leftover("young", 3600, below), leftover("old", 2 * 86_400, below)
        prune(older_than=0)
        assert [path.exists() for path in (running, killed, young, old)] == [True, True, True, False]
    prune(older_than=0)
    assert [path.exists() for path in (running, killed, young)] == [True, False, False]
    lock.release()
    prune(older_than=0)
    assert not running.exists()


def test_leftovers_of_wheels_are_swept(make_project, project_spec, leftover):
    """The next build of a wheel removes the leftovers of a killed one."""
    abandoned = leftover("0123456789ab", 60, below=".wheels")
    project_spec(make_project()).fingerprint()
    assert not abandoned.exists()


def test_two_containers(spec_of, age, in_container):
    """An environment stays while a process of another container runs from it, whoever has requested it and when."""
    folder = Path(create_local_venv(spec_of("alpha"))).parent.parent
    code = "from fairlead_venvs import prune; print(prune(older_than=0, dry_run={}), prune(older_than=0))"
    pruning = in_container(sys.executable, "-c", code.format(False))
    looking = in_container(sys.executable, "-c", code.format(True))

    def run(command):
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    # The program that requested it has ended, and this one has no modules of the environment mapped.
    worker = in_container(str(folder / "bin" / "python"), "-c", "print('up', flush=True); input()")
    with subprocess.Popen(worker, stdin=-1, stdout=-1) as running:
        assert running.stdout.readline() == b"up\n"
        age(7200)
        assert run(pruning) == run(looking) == "[] []\n"
        assert folder.exists()
        running.communicate(b"\n", timeout=60)
    assert str(folder) in run(looking)
    assert not folder.exists()


def test_read_only(spec_of, age, root):
    """On a file system that is mounted read only, environments are found and listed, and none is removed."""
    python = create_local_venv(spec_of("alpha"))
    age(3600)
    mount = f"mount --bind {root} {root} && mount -o remount,ro,bind {root} && exec "
    code = f"""
        from fairlead_venvs import create_local_venv, list_venvs, prune, VenvSpec
        assert create_local_venv({spec_of("alpha")!r}) == {python!r}
        assert [venv.python for venv in list_venvs()] == [{python!r}] == [venv.python for venv in prune(dry_run=True)]
        assert prune() == []
    """
    prefix = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*prefix, mount + "true"], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    command = [*prefix, mount + shlex.join([sys.executable, "-c", textwrap.dedent(code)])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"Kept {Path(python).parent.parent}" in done.stderr
    assert os.path.exists(python)


def test_build_in_another_container(spec_of, tmp_path, in_container):
    """The folder of a build that has run for days in another container stays."""
    up = tmp_path / "up"
    setup = ["python", "-c", f"import pathlib, time; pathlib.Path({str(up)!r}).touch(); time.sleep(600)"]
    code = "from fairlead_venvs import VenvSpec, create_local_venv; create_local_venv({!r})"
    builder = in_container(sys.executable, "-c", code.format(spec_of("alpha", setup=setup)))
    with subprocess.Popen(builder) as running:
        try:
            deadline = time.monotonic() + 60
            while not up.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            (aside,) = venv_root().glob(f"*{BUILDING}*")
            os.utime(aside, (time.time() - 2 * 86_400,) * 2)
            prune(older_than=0)
            assert aside.exists()
        finally:
            running.kill()
    prune(older_than=0)
    assert not aside.exists()


def test_keep_names_an_environment(spec_of, age):
    """A name in `keep` that matches nothing is refused before anything is removed; a spec need not match."""
    folder = Path(create_local_venv(spec_of("alpha"))).parent.parent
    age(3600)
    with pytest.raises(ValueError, match=f"keep names no environment: typo. There are: {folder.name}"):
        prune(keep=["typo", folder.name])
    assert folder.exists()
    assert prune(keep=[spec_of("gamma"), f"{folder}/"]) == []


def test_clocks_that_differ(spec_of, monkeypatch):
    """Ages are those of the file system's clock, so a clock of this host that is ahead removes nothing in use."""
    folder = Path(create_local_venv(spec_of("alpha"))).parent.parent
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 36_000)
    assert prune(older_than=3600) == []
    # A clock that is behind marks environments all the same.
    mark = folder / USED / host_id()
    os.utime(mark, (clock() - 7200,) * 2)
    monkeypatch.setattr(time, "time", lambda: clock() - 36_000)
    mark_used(folder)
    assert clock() - mark.stat().st_mtime < 60
