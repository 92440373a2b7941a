# SPDX-License-Identifier: Apache-2.0
"""Listing and removing environments, and the processes that keep theirs."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fairlead_venvs import VenvSpec, create_local_venv, list_venvs, prune
from fairlead_venvs._node.store import MANIFEST, lock_place, try_lock

WAIT = "print('up', flush=True); input()"


@pytest.fixture
def age(root):
    """Set back the time of the last use of every environment and note."""

    def set_back(seconds):
        for mark in root.glob(f"*/{MANIFEST}"):
            os.utime(mark, (time.time() - seconds,) * 2)

    return set_back


@pytest.fixture
def build(spec_of):
    """Build an environment, and return its folder."""
    return lambda *requirements, **options: Path(create_local_venv(spec_of(*requirements, **options))).parent.parent


def run(command):
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def start(folder, prefix=(), code=WAIT):
    """Start a process in an environment, and return it when it is up."""
    process = subprocess.Popen([*prefix, folder / "bin" / "python", "-c", code], stdin=-1, stdout=-1, text=True)
    assert process.stdout.readline() == "up\n"
    return process


def test_list(make_project, project_spec):
    """The list has the content, last use and processes of each environment."""
    assert list_venvs() == []
    before = time.time()
    small = create_local_venv(VenvSpec(requirements=[]))
    python = create_local_venv(project_spec(make_project(more="[dependency-groups]\ndev = []\n"), groups=["dev"]))
    with start(Path(python).parent.parent) as running:
        other, project = sorted(list_venvs(), key=lambda venv: venv.description)
        running.communicate("\n", timeout=60)

    assert (project.python, other.python) == (python, small)
    assert project.description == "project proj, dev"
    assert project.pids == (running.pid,)
    assert other.pids == ()
    assert before - 1 <= project.built_at <= project.used_at <= time.time()


def test_variable_counts_as_use(build, age, root, tmp_path, monkeypatch, eventually):
    """A worker is recognised by its VIRTUAL_ENV, also through a link, and keeps its environment."""
    root.mkdir(0o700)
    (tmp_path / "link").symlink_to(root)
    monkeypatch.setenv("FAIRLEAD_VENV_DIR", str(tmp_path / "link"))
    folder = build("alpha")
    age(3600)
    with subprocess.Popen(["sleep", "600"], env={**os.environ, "VIRTUAL_ENV": str(folder)}) as sleeper:
        assert eventually(lambda: list_venvs()[0].pids == (sleeper.pid,))
        assert prune() == []
        sleeper.kill()
    assert [venv.path for venv in prune()] == [folder]
    assert not folder.exists()


def test_prune(build, spec_of, age, root):
    """Environments that are in use, recent, being built or kept stay; others and damaged ones are removed."""
    used, by_spec, by_name, locked, gone = map(build, ("alpha", "beta", "gamma", "alpha<2", "beta<2"))
    gone = build("alpha", "gamma")
    assert prune() == []
    damaged, not_ours = root / "venv-0123456789ab", root / "data-0123456789ab"
    for folder in (damaged, not_ours):
        folder.mkdir()
    (damaged / "pyvenv.cfg").touch()
    age(3600)
    for folder in (damaged, not_ours):
        os.utime(folder, (0, 0))
    assert prune(older_than=7200) == []
    with lock_place(locked) as taken, start(used) as running:
        assert taken
        age(3600)  # the specs in `keep` are looked up without a mark of use
        removed = prune(keep=[spec_of("beta"), by_name.name])
        running.communicate("\n", timeout=60)

    assert [venv.path for venv in removed] == [gone]
    assert [path.exists() for path in (used, by_spec, by_name, locked, gone)] == [True, True, True, True, False]
    assert not damaged.exists()
    assert not_ours.exists()
    assert build("alpha", "gamma") == gone


def test_lock_that_is_held_for_a_moment(build):
    """A process that starts while its lock is taken tries again, and then keeps its environment."""
    folder = build("alpha")
    lock = contextlib.ExitStack()
    assert lock.enter_context(try_lock(folder / MANIFEST))
    threading.Timer(0.3, lock.close).start()
    with start(folder) as running:
        with try_lock(folder / MANIFEST) as taken:
            assert taken is False
        running.communicate("\n", timeout=60)
    with try_lock(folder / MANIFEST) as taken, start(folder) as running:  # it does not wait for ever
        assert taken
        running.communicate("\n", timeout=60)


@pytest.mark.nightly
def test_prune_beside_starts(spec_of):
    """No process loses its environment, while another one prunes everything that is not in use all the time."""
    spec, done, removed = spec_of("alpha", "beta"), threading.Event(), []

    def prune_all():
        while not done.is_set():
            removed.extend(prune(older_than=0))

    pruning = threading.Thread(target=prune_all)
    pruning.start()
    code = f"{WAIT}; import time; time.sleep(0.1); import beta; print(beta.version)"
    starts = 0
    try:
        while starts < 50:
            folder = Path(create_local_venv(spec)).parent.parent
            try:
                process = start(folder, code=code)
            except FileNotFoundError:  # it was removed before it was used
                continue
            starts += 1
            assert process.communicate("\n", timeout=60)[0] == "1.0\n"
            assert process.returncode == 0
    finally:
        done.set()
        pruning.join()
    assert removed


def test_notes(make_project, project_spec, root, age):
    """A note is kept for 30 days after its last use."""
    project_spec(make_project()).fingerprint()
    (note,) = root.glob(".note-*")
    prune(older_than=0)
    assert note.exists()
    age(31 * 86_400)
    prune()
    assert not note.exists()


def test_leftovers(root, build):
    """A build keeps its folder while it holds its lock; what a killed one has left is removed by the next build."""
    build("alpha")
    running, killed = (root / f"{name}-0123456789ab.aside-00" for name in ("one", "two"))
    for folder in (running, killed):
        folder.mkdir()
    with lock_place(root / "one-0123456789ab") as taken:
        assert taken
        build("beta")
        assert [path.exists() for path in (running, killed)] == [True, False]
    prune()
    assert not running.exists()


def test_two_containers(build, age, in_container):
    """An environment stays while a process of another container runs from it, whoever has requested it and when."""
    folder = build("alpha")
    code = "from fairlead_venvs import prune; print([str(venv.path) for venv in prune(older_than=0)])"
    pruning = in_container(sys.executable, "-c", code)
    with start(folder, in_container()) as running:
        age(7200)
        assert run(pruning) == "[]\n"
        assert folder.exists()
        facts = (folder / MANIFEST).read_text()
        (folder / MANIFEST).write_text("")  # a damaged environment is in use, too
        assert run(pruning) == "[]\n"
        assert folder.exists()
        (folder / MANIFEST).write_text(facts)
        running.communicate("\n", timeout=60)
    assert run(pruning) == f"[{str(folder)!r}]\n"
    assert not folder.exists()


def test_misuse(build, spec_of, age):
    """What `keep` and `older_than` cannot mean is refused before anything is removed; a spec need not match."""
    folder = build("alpha")
    age(3600)
    with pytest.raises(ValueError, match=f"keep names no environment: typo. There are: {folder.name}"):
        prune(keep=["typo", folder.name])
    with pytest.raises(ValueError, match="older_than must be a number of seconds"):
        prune(older_than=-1)
    assert folder.exists()
    assert prune(keep=[spec_of("gamma"), f"{folder}/"]) == []
