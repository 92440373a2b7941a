# SPDX-License-Identifier: Apache-2.0
"""Faults during a build are reported, and leave nothing broken."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from fairlead_venvs import UvUnavailableError, VenvBuildError, VenvError, VenvSpec, VenvTimeoutError, create_local_venv
from fairlead_venvs._build import publish
from fairlead_venvs._build.publish import BUILDING, KernelLock, hold_lock
from fairlead_venvs._build.store import lock_path
from fairlead_venvs._build.uv import Deadline, Runner, Session
from fairlead_venvs._planning import wheel
from fairlead_venvs._planning.plan import plan_venv

ASK = """
    import sys
    from fairlead_venvs import VenvError, VenvSpec, create_local_venv
    spec = VenvSpec(requirements={requirements!r}, find_links=[{wheels!r}], no_index=True, setup={setup!r})
    print("up", flush=True)
    sys.stdin.readline()
    try:
        print(create_local_venv(spec))
    except VenvError as error:
        sys.exit(f"{{type(error).__name__}}: {{error}}")
"""


@pytest.fixture
def start(wheels):
    """Start a process that builds an environment when it reads a line."""
    started = []

    def begin(*requirements, setup=(), prefix=(), root=None):
        source = textwrap.dedent(ASK).format(requirements=requirements, wheels=str(wheels), setup=list(setup))
        env = {**os.environ, **({"FAIRLEAD_VENV_DIR": str(root)} if root else {})}
        process = subprocess.Popen(
            [*prefix, sys.executable, "-c", source],
            env=env,
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


@pytest.mark.nightly
def test_killed(start, spec_of, tools, root):
    """Whenever the builder is killed, there is a complete environment or none, and the next call gives one."""
    spec = spec_of("beta", "gamma")
    python = create_local_venv(spec)
    began = time.monotonic()
    create_local_venv(spec, force_rebuild=True)
    whole = time.monotonic() - began
    folder = Path(python).parent.parent
    for moment in [1.3 * (number + random.random()) / 6 for number in range(6)]:
        shutil.rmtree(folder)
        builder = start("beta", "gamma")
        assert builder.stdout.readline() == "up\n"
        go(builder)
        time.sleep(moment * whole)
        builder.kill()
        builder.wait()
        # It keeps a complete one.
        assert create_local_venv(spec) == python, f"killed after {moment:.2f} of a build"
        assert tools.says(python, "import beta, gamma; print('works')") == "works"
    create_local_venv(spec, force_rebuild=True)  # a build sweeps what is left of one that was killed after it was done


def test_killed_in_the_middle(start, spec_of, tools, root):
    """A builder that dies leaves an incomplete folder aside, which the next build removes."""
    die = ["python", "-c", "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"]
    builder = start("alpha", setup=die)
    go(builder)
    assert builder.wait(60) == -signal.SIGKILL
    (left,) = root.glob(f"*{BUILDING}*")
    place = Path(str(left).partition(BUILDING)[0])
    assert not place.exists()

    spec = spec_of("alpha", setup=die)
    assert place.name == f"venv-{spec.fingerprint()[:12]}"
    # The build of another environment does not remove it; the next build of the same one does.
    with pytest.raises(VenvBuildError):
        create_local_venv(VenvSpec(requirements=["nothing-like-this"], no_index=True))
    assert left.exists()
    again = start("alpha", setup=die)
    go(again)
    assert again.wait(60) == -signal.SIGKILL
    assert not left.exists()
    for path in root.glob(f"*{BUILDING}*"):
        shutil.rmtree(path)


def test_leftovers_of_others(spec_of, root, monkeypatch):
    """Where locks do not decide, leftovers are removed only when they are old, as their builder may live."""
    spec = spec_of("alpha")
    folder = root / f"venv-{spec.fingerprint()[:12]}"
    young, old = (folder.with_name(f"{folder.name}{BUILDING}{number}") for number in range(2))
    for path in (young, old):
        path.mkdir(parents=True)
    os.utime(old, (0, 0))
    monkeypatch.setattr(publish, "locks_decide", lambda root: False)
    create_local_venv(spec)
    assert [path.exists() for path in (young, old)] == [True, False]
    young.rmdir()


def test_many_at_once(start, tools, tmp_path):
    """Eight processes need a new environment at once: it is built once, and all get the same."""
    count = tmp_path / "built"
    note = ["python", "-c", f"open({str(count)!r}, 'a').write('once ')"]
    asking = [start("beta", "gamma", setup=note) for _ in range(8)]
    for process in asking:
        assert process.stdout.readline() == "up\n"
    for process in asking:
        go(process)
    answers = [process.communicate(timeout=120) for process in asking]

    assert {err for _, err in answers} == {""}
    assert len({out for out, _ in answers}) == 1
    assert count.read_text() == "once "


def test_many_projects_at_once(make_project, project_spec, tmp_path):
    """Several processes need the same new project: its wheel is built once, too."""
    folder = make_project()
    count = tmp_path / "wheels-built"
    backend = folder / "backend.py"
    head = "def build_wheel(folder, config_settings=None, metadata_directory=None):\n"
    noted = backend.read_text().replace(head, f"{head}    open({str(count)!r}, 'a').write('once ')\n")
    backend.write_text(noted)
    code = f"from fairlead_venvs import *; print(create_local_venv({project_spec(folder)!r}))"
    asking = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]

    (answer,) = {process.communicate(timeout=120)[0] for process in asking}
    assert answer.endswith("/bin/python\n")
    assert count.read_text() == "once "


def test_output_of_a_process_that_stays(tmp_path):
    """A command has ended when it has, whoever holds its output open; its last lines are kept."""
    command = ["sh", "-c", "sleep 60 & seq 200000"]
    began = time.monotonic()
    lines = Runner(Session(Deadline(60))).run(command, cwd=tmp_path, failed="").splitlines()
    assert time.monotonic() - began < 30
    assert lines == [str(number) for number in range(199_951, 200_001)]


def test_no_room_for_temporary_files(spec_of, monkeypatch, tmp_path):
    """The error says which folders need room; the first one that is named is not the only one."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(VenvBuildError, match=r"missing.*FAIRLEAD_VENV_DIR.*\(TMPDIR\) must be writable and have room"):
        create_local_venv(spec_of("alpha"))


def test_waiting_is_patient(root, monkeypatch):
    """A process that waits longer looks less often, as many nodes may share the folder (seam: the clock)."""
    root.mkdir()
    looks, pauses = [], []
    monkeypatch.setattr(publish, "time", SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append))
    deadline = SimpleNamespace(timeout_s=60.0, left=lambda: max(0.0, 60.0 - sum(pauses)))
    lock = KernelLock(root, lock_path(root / "venv"))
    assert lock.acquire()
    with pytest.raises(VenvTimeoutError), hold_lock(root, root / "venv", deadline, lambda: looks.append(1) or False):
        pass
    lock.release()
    assert 100 < len(looks) < 200


def test_no_locks(spec_of, monkeypatch, tools, tmp_path):
    """On a file system without locks, several may build at once, but all get one environment that works."""

    def no_locks(file, how):
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr("fairlead_venvs._build.publish.fcntl.flock", no_locks)
    count = tmp_path / "built"
    # All of them build before the first one is done.
    script = f"""if True:
        import time
        with open({str(count)!r}, "a") as file:
            file.write("once ")
        until = time.monotonic() + 100
        while open({str(count)!r}).read() != "once " * 4 and time.monotonic() < until:
            time.sleep(0.02)
    """
    spec = spec_of("alpha", setup=["python", "-c", script])
    with ThreadPoolExecutor(4) as pool:
        (python,) = set(pool.map(lambda _: create_local_venv(spec), range(4)))
    assert count.read_text() == "once " * 4
    assert tools.says(python, "import alpha; print(alpha.version)") == "2.0"


def test_no_uv(spec_of, tmp_path, monkeypatch):
    """The error names a uv that is missing or too old, and the remedy."""
    for output, said in (
        ("uv 0.1.2", "version 0.1.2, and the oldest supported is 0.8.0"),
        ("hello", "does not report its version"),
    ):
        program = tmp_path / "uv"
        program.write_text(f"#!/bin/sh\necho '{output}'\n")
        program.chmod(0o755)
        monkeypatch.setenv("FAIRLEAD_VENV_UV", str(program))
        with pytest.raises(UvUnavailableError, match=said):
            create_local_venv(spec_of("alpha"))
    monkeypatch.setenv("FAIRLEAD_VENV_UV", str(tmp_path / "nowhere"))
    with pytest.raises(UvUnavailableError, match=r"nowhere does not run.*pip install uv"):
        create_local_venv(spec_of("alpha"))
    # Neither a package nor a program.
    monkeypatch.delenv("FAIRLEAD_VENV_UV")
    code = "import sys; sys.modules['uv'] = None\n" + "from fairlead_venvs._build.uv import *; find_uv(Deadline(9))"
    env = {**os.environ, "PATH": str(tmp_path / "empty")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert "uv is needed to build environments: found neither the package uv nor a program" in done.stderr
    assert "UvUnavailableError: " in done.stderr


def test_lock_that_does_not_match(make_project, project_spec, tools):
    """A lock that does not match its pyproject is refused, unless the spec is frozen."""
    folder = make_project()
    pyproject = folder / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace("alpha==1.0", "alpha==2.0"))
    with pytest.raises(VenvBuildError, match=r"does not match its pyproject.toml. Run `uv lock`") as caught:
        create_local_venv(project_spec(folder))
    assert "needs to be updated" in str(caught.value)
    python = create_local_venv(project_spec(folder, frozen=True))
    assert tools.says(python, "import alpha; print(alpha.version)") == "1.0"
    # A spec that is not frozen does not get the environment of the frozen one.
    with pytest.raises(VenvBuildError, match=r"does not match its pyproject.toml"):
        create_local_venv(project_spec(folder))


def test_wheel_without_locks(make_project, project_spec, monkeypatch):
    """On a file system without locks, two processes that build different bytes both use the first wheel."""
    folder = make_project()
    spec = project_spec(folder)
    backend = folder / "backend.py"
    unique = 'wheel.writestr(f"{stem}.dist-info/BUILT", str(__import__("time").time_ns()))'
    backend.write_text(backend.read_text().replace("    return name\n", f"        {unique}\n    return name\n", 1))
    built = wheel._find_wheel
    asked = []

    def kept(store, root):
        ready = built(store, root)
        asked.append(store)
        if len(asked) == 3:
            # Another process has finished between the last look and the end of this build.
            content = asked[0] / "0123"
            content.mkdir(parents=True)
            (content / "proj-0.1-py3-none-any.whl").write_bytes(b"first")
        return ready

    monkeypatch.setattr(wheel, "_find_wheel", kept)
    plan = plan_venv(spec)
    (sent,) = [path for name, path in plan.files if name.startswith("own/")]
    assert sent.read_bytes() == b"first"


def test_unknown_package(spec_of):
    """The error has uv's output and the command."""
    with pytest.raises(VenvBuildError, match="uv could not resolve the requirements") as caught:
        create_local_venv(spec_of("alpha==3.0"))
    assert "pip compile" in caught.value.command
    assert any("there is no version of alpha==3.0" in line for line in caught.value.output)
    assert caught.value.node is None


def test_no_network():
    """uv reports an index that does not answer, and the error has its output."""
    spec = VenvSpec(requirements=["alpha"], index="http://127.0.0.1:9/simple", env={"UV_HTTP_RETRIES": "0"})
    with pytest.raises(VenvBuildError) as caught:
        create_local_venv(spec)
    assert "127.0.0.1:9" in str(caught.value)


def mounted(folder, options):
    """Return the prefix of a command that runs with a small private file system in a folder."""
    script = f'mount -t tmpfs -o {options} tmpfs "{folder}" && exec "$@"'
    prefix = [
        "unshare",
        "--mount",
        *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]),
        "sh",
        "-c",
        script,
        "sh",
    ]
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    return prefix


def test_disk_full(start, tmp_path):
    """The error names a full file system."""
    small = tmp_path / "small"
    small.mkdir()
    fill = ["python", "-c", "open('big', 'wb').write(bytes(2 ** 21))"]
    asking = start("alpha", setup=fill, prefix=mounted(small, "size=1m"), root=small)
    out, err = asking.communicate("\n", timeout=150)
    assert out == "up\n"
    assert "VenvBuildError" in err
    assert "No space left on device" in err


@pytest.mark.parametrize("options", ["ro", "size=4k,nr_inodes=3"])
def test_folder_that_cannot_be_written(start, tmp_path, options):
    """The error of a folder that is read only or full names the setting that chooses it."""
    folder = tmp_path / "unfit"
    folder.mkdir()
    out, err = start("alpha", prefix=mounted(folder, options), root=folder).communicate("\n", timeout=150)
    assert out == "up\n"
    assert "VenvBuildError" in err
    assert "FAIRLEAD_VENV_DIR" in err


def test_folder_that_is_none(spec_of, tmp_path, monkeypatch):
    """The folder cannot be below a file."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("FAIRLEAD_VENV_DIR", str(tmp_path / "file" / "venvs"))
    with pytest.raises(VenvBuildError, match="FAIRLEAD_VENV_DIR"):
        create_local_venv(spec_of("alpha"))


def test_waiting_has_a_deadline(start, spec_of, monkeypatch):
    """Waiting for the build of another process ends at the deadline (seam: the start of the wait)."""

    def hold_late(root, place, deadline, *args, **options):
        if place.name.startswith("venv-"):
            deadline._end = time.monotonic() + 0.2
        return hold_lock(root, place, deadline, *args, **options)

    monkeypatch.setattr(publish, "hold_lock", hold_late)
    slow = ["python", "-c", "print('building', flush=True); import time; time.sleep(600)"]
    builder = start("alpha", setup=slow)
    go(builder)
    spec = spec_of("alpha", setup=slow)
    lock = Path(os.environ["FAIRLEAD_VENV_DIR"], ".locks", f"venv-{spec.fingerprint()[:12]}.lock")
    deadline = time.monotonic() + 60
    while not list(lock.parent.parent.glob("*.building-*/env/bin/python")) and time.monotonic() < deadline:
        time.sleep(0.02)
    with pytest.raises(VenvError, match="waiting for another process that builds"):
        create_local_venv(spec, timeout_s=600)
    builder.send_signal(signal.SIGINT)
    assert builder.wait(60) != 0
    assert list(lock.parent.parent.glob("*.building-*")) == []
