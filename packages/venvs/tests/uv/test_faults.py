# SPDX-License-Identifier: Apache-2.0
"""Bad input and faults during a build are reported, and leave nothing broken. uv itself runs in each of these tests."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from fairlead_venvs import UvUnavailableError, VenvBuildError, VenvTimeoutError, create_local_venv
from fairlead_venvs._lock import plan_venv
from fairlead_venvs._node.uv import Deadline

ASK = """
    import logging, sys
    from fairlead_venvs import VenvError, VenvSpec, create_local_venv
    logging.basicConfig(format="%(levelname)s %(message)s")
    spec = VenvSpec(requirements={requirements!r}, find_links=[{wheels!r}], no_index=True, setup={setup!r})
    print("up", flush=True)
    sys.stdin.readline()
    try:
        print(create_local_venv(spec))
    except VenvError as error:
        sys.exit(f"{{type(error).__name__}}: {{error}}")
"""
# A library that is loaded before all others, and refuses to lock what is below a folder `venvs`.
REFUSE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int flock(int file, int how) {
    char link[64], path[4096] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    if (readlink(link, path, sizeof path - 1) > 0 && strstr(path, "/venvs/")) {
        errno = ENOLCK;
        return -1;
    }
    return ((int (*)(int, int))dlsym(RTLD_NEXT, "flock"))(file, how);
}
"""


@pytest.fixture
def start(wheels):
    """Start a process that builds an environment when it reads a line."""
    started = []

    def begin(*requirements, setup=(), prefix=(), **variables):
        source = textwrap.dedent(ASK).format(requirements=requirements, wheels=str(wheels), setup=list(setup))
        process = subprocess.Popen(
            [*prefix, sys.executable, "-c", source],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def go(process):
    process.stdin.write("\n")
    process.stdin.flush()


def count_builds(file):
    """Return a setup command that adds a word to a file."""
    return ["python", "-c", f"open({str(file)!r}, 'a').write('once ')"]


@pytest.mark.nightly
def test_killed(start, spec_of, tools, root):
    """Whenever the builder is killed, there is a complete environment or none, and the next call gives one."""
    spec = spec_of("beta", "gamma")
    python = create_local_venv(spec)
    began = time.monotonic()
    create_local_venv(spec, force_rebuild=True)
    whole = time.monotonic() - began
    for moment in [1.3 * (number + random.random()) / 20 for number in range(20)]:
        shutil.rmtree(root)
        builder = start("beta", "gamma")
        assert builder.stdout.readline() == "up\n"
        go(builder)
        time.sleep(moment * whole)
        builder.kill()
        builder.wait()
        assert create_local_venv(spec) == python, f"killed after {moment:.2f} of a build"
        assert tools.says(python, "import beta, gamma; print('works')") == "works"
    create_local_venv(spec, force_rebuild=True)  # a build sweeps what is left of one that was killed after it was done


def test_many_at_once(start, tmp_path):
    """Sixteen processes need a new environment at once: it is resolved and built once, and all get the same."""
    count = tmp_path / "built"
    asking = [start("beta", "gamma", setup=count_builds(count)) for _ in range(16)]
    for process in asking:
        assert process.stdout.readline() == "up\n"
    for process in asking:
        go(process)
    answers = [process.communicate(timeout=300) for process in asking]

    assert {err for _, err in answers} == {""}
    assert len({out for out, _ in answers}) == 1
    assert count.read_text() == "once "


def test_no_locks(start, tools, tmp_path):
    """Where the file system refuses to lock, several may build, with one warning each, and all get one environment."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no compiler")
    library, count = tmp_path / "refuse.so", tmp_path / "built"
    (tmp_path / "refuse.c").write_text(REFUSE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "refuse.c"], check=True)
    # All of them build before the first one is done.
    script = f"""if True:
        import time
        with open({str(count)!r}, "a") as file:
            file.write("once ")
        until = time.monotonic() + 100
        while open({str(count)!r}).read() != "once " * 3 and time.monotonic() < until:
            time.sleep(0.02)
    """
    asking = [start("alpha", setup=["python", "-c", script], LD_PRELOAD=str(library)) for _ in range(3)]
    for process in asking:
        go(process)
    answers = [process.communicate(timeout=200) for process in asking]
    assert count.read_text() == "once " * 3
    for out, err in answers:
        assert out == answers[0][0]
        assert err.count("WARNING") == err.count("has no locks") == len(err.splitlines()) == 1
    python = answers[0][0].splitlines()[-1]
    assert tools.says(python, "import alpha; print(alpha.version)") == "2.0"


def test_two_hosts_on_one_folder(start, tmp_path, in_container):
    """Two hosts that share a folder build an environment once."""
    count = tmp_path / "built"
    asking = [start("beta", setup=count_builds(count), prefix=in_container()) for _ in range(2)]
    for process in asking:
        assert process.stdout.readline() == "up\n"
        go(process)
    assert len({process.communicate(timeout=200)[0] for process in asking}) == 1
    assert count.read_text() == "once "


def test_no_uv(spec_of, tmp_path, monkeypatch):
    """The error names a uv that is missing or too old, and the remedy."""
    program = tmp_path / "uv"
    program.touch(0o755)
    monkeypatch.setenv("FAIRLEAD_VENV_UV", str(program))
    for output in ("uv 0.12.9", "hello"):
        program.write_text(f"#!/bin/sh\necho '{output}'\n")
        with pytest.raises(UvUnavailableError, match=f"oldest supported version is 0.13.0.*{output}"):
            create_local_venv(spec_of("alpha"))
    monkeypatch.setenv("FAIRLEAD_VENV_UV", str(tmp_path / "nowhere"))
    with pytest.raises(UvUnavailableError, match=r"nowhere does not run.*pip install uv"):
        create_local_venv(spec_of("alpha"))
    monkeypatch.delenv("FAIRLEAD_VENV_UV")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "empty" / "python"))
    with pytest.raises(UvUnavailableError, match="there is no program uv beside"):
        create_local_venv(spec_of("alpha"))


def test_lock_that_does_not_match(make_project, project_spec, tools):
    """A lock that does not match its pyproject is refused, unless the spec is frozen."""
    folder = make_project()
    pyproject = folder / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace("alpha==1.0", "alpha==2.0"))
    with pytest.raises(VenvBuildError, match="could not export the lock") as caught:
        create_local_venv(project_spec(folder))
    assert "needs to be updated" in str(caught.value)
    python = create_local_venv(project_spec(folder, frozen=True))
    assert tools.says(python, "import alpha; print(alpha.version)") == "1.0"
    # A spec that is not frozen does not get the environment of the frozen one.
    with pytest.raises(VenvBuildError, match="needs to be updated"):
        create_local_venv(project_spec(folder))


def test_note_that_is_replaced(make_project, project_spec):
    """A plan whose source distribution another driver replaces, before it is read, never gets the other's."""
    folder = make_project()
    plan = plan_venv(project_spec(folder), None, Deadline(60))
    assert plan.read_files()
    (folder / "src" / "proj" / "__init__.py").write_text("answer = 43\n")
    other = plan_venv(project_spec(folder), None, Deadline(60))
    assert other.recipe.fingerprint != plan.recipe.fingerprint
    with pytest.raises(VenvBuildError, match="was there when the environment was planned"):
        plan.read_files()


def test_unknown_names(spec_of, make_project, project_spec):
    """The error of an unknown package, extra or group has uv's own words and the command."""
    with pytest.raises(VenvBuildError, match="uv could not resolve the requirements") as caught:
        create_local_venv(spec_of("alpha==3.0"))
    assert "pip compile" in caught.value.command
    assert any("there is no version of alpha==3.0" in line for line in caught.value.output)
    assert caught.value.node is None
    folder = make_project()
    for fields, said in (({"extras": ["y"]}, "Extra `y` is not defined"), ({"groups": ["z"]}, "Group `z` is not")):
        with pytest.raises(VenvBuildError, match=said):
            create_local_venv(project_spec(folder, **fields))


def test_no_build_backend(make_project, project_spec):
    """The error of a node that cannot get the build backend of the project says what is missing."""
    folder = make_project()
    backend = folder / "backend.py"
    needs = "def get_requires_for_build_wheel(config_settings=None):\n    return ['no-such-backend']\n"
    backend.write_text(backend.read_text() + needs)
    with pytest.raises(VenvBuildError, match="needs its build backend from the index or from uv's cache"):
        create_local_venv(project_spec(folder))


def mounted(folder, options):
    """Return the prefix of a command that runs with a small private file system in a folder."""
    script = f'mount -t tmpfs -o {options} tmpfs "{folder}" && exec "$@"'
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    prefix = ["unshare", "--mount", *user, "sh", "-c", script, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    return prefix


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("size=1m,mode=700", "No space left on device"),
        ("ro,mode=700", "FAIRLEAD_VENV_DIR"),
        ("size=4k,nr_inodes=3,mode=700", "FAIRLEAD_VENV_DIR"),
    ],
)
def test_folder_that_cannot_be_written(start, tmp_path, options, said):
    """The error of a folder that is full or read only names it, and the setting that chooses it."""
    folder = tmp_path / "unfit"
    folder.mkdir()
    fill = ["python", "-c", "open('big', 'wb').write(bytes(2 ** 21))"]
    asking = start("alpha", setup=fill, prefix=mounted(folder, options), FAIRLEAD_VENV_DIR=str(folder))
    out, err = asking.communicate("\n", timeout=150)
    assert out == "up\n"
    assert "VenvBuildError" in err
    assert said in err


def test_folder_of_others(spec_of, root, monkeypatch):
    """A folder that another user owns or may change is refused with the remedy; a group shares it only on request."""
    python = create_local_venv(spec_of("alpha"))
    assert root.stat().st_mode & 0o777 == 0o700
    root.chmod(0o770)
    with pytest.raises(VenvBuildError, match=rf"mode 770\. .*chmod go-w {root}"):
        create_local_venv(spec_of("alpha"))
    with monkeypatch.context() as patch:
        patch.setenv("FAIRLEAD_VENV_SHARED", "1")
        assert create_local_venv(spec_of("alpha")) == python
        root.chmod(0o777)
        with pytest.raises(VenvBuildError, match="mode 777"):
            create_local_venv(spec_of("alpha"))
    if os.geteuid() == 0:
        root.chmod(0o755)
        os.chown(root, 12345, 12345)
        with pytest.raises(VenvBuildError, match=r"belongs to the uid 12345 .*FAIRLEAD_VENV_SHARED=1"):
            create_local_venv(spec_of("alpha"))


def test_shared_folder(spec_of, root):
    """In a folder that a group shares, its members can replace and remove what others have made."""
    code = f"from fairlead_venvs import *; create_local_venv({spec_of('alpha')!r})"
    env = {**os.environ, "FAIRLEAD_VENV_SHARED": "1"}
    subprocess.run([sys.executable, "-c", code], env=env, umask=0o007, check=True, timeout=100)
    folders = [path for path in (root, *root.rglob("*")) if path.is_dir() and not path.is_symlink()]
    assert len(folders) > 5
    assert [path for path in folders if path.stat().st_mode & 0o027 != 0o020] == []


@pytest.mark.parametrize("word", ["--version", "compile", "venv", "sync"])
def test_deadline(spec_of, tools, tmp_path, monkeypatch, eventually, word):
    """Each step ends at the deadline with all its processes, and the error names it."""
    program = tmp_path / "uv"
    real = shutil.which("uv")
    program.write_text(
        f'#!/bin/sh\ncase " $* " in *" {word} "*) sleep 6543 & sleep 6543;; *) exec {real} "$@";; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("FAIRLEAD_VENV_UV", str(program))
    with pytest.raises((VenvTimeoutError, UvUnavailableError), match=f"{word}|does not run") as caught:
        create_local_venv(spec_of("alpha"), timeout_s=3)
    assert isinstance(caught.value, VenvTimeoutError) == (word != "--version")
    assert word == "--version" or eventually(lambda: tools.running("sleep\x006543") == [])
    for pid in tools.running("sleep\x006543"):
        os.kill(int(pid), signal.SIGKILL)


def test_waiting_has_a_deadline(start, spec_of, root, eventually):
    """Waiting for the build of another process ends at the deadline; an interrupted builder leaves nothing."""
    slow = ["python", "-c", "print('building', flush=True); import time; time.sleep(600)"]
    builder = start("alpha", setup=slow)
    go(builder)
    assert eventually(lambda: list(root.glob("*.aside-*/env/bin/python")))
    with pytest.raises(VenvTimeoutError, match="waiting for another process that builds"):
        create_local_venv(spec_of("alpha", setup=slow), timeout_s=1)
    builder.send_signal(signal.SIGINT)
    assert builder.wait(60) != 0
    assert list(root.glob("*.aside-*")) == []


@pytest.mark.parametrize(
    "damage", ["", "[]", "[" * 100_000, '{"format": 5}', '{"format": 5, "sources": [], "paths": 3}']
)
def test_damaged_note(spec_of, root, damage):
    """Requirements are resolved again if the note of the resolution cannot be read."""
    python = create_local_venv(spec_of("beta"))
    (note,) = root.glob(".note-*/.fairlead-complete.json")
    facts = json.loads(note.read_text())
    note.write_text(damage)
    assert create_local_venv(spec_of("beta")) == python
    assert json.loads(note.read_text()) == facts
