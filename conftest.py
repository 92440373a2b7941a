# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all test suites. This file does not import Ray, because some packages are tested without it."""

import ast
import contextlib
import dis
import gc
import importlib.util
import inspect
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

# A shell starts background jobs with SIGINT ignored, and their children inherit that. Some tests send SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Ray records in this folder which cluster it started last, so test processes that run side by side have a folder each.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["RAY_TMPDIR"] = os.path.join(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()), worker)

# Not every package is tested with hypothesis.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    # No deadline: on a busy machine it would fail tests for being slow. No database: a test run leaves no files.
    examples = int(os.environ.get("FAIRLEAD_EXAMPLES", "150"))
    settings.register_profile("fairlead", max_examples=examples, deadline=None, database=None)
    settings.load_profile("fairlead")

# With these settings of its head, Ray declares a node whose raylet was killed dead within about a second. A raylet that
# is only slow, because the machine is busy, has five seconds to answer. One that has just joined is not checked yet.
QUICK_DEATHS = {
    "health_check_initial_delay_ms": 2000,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 2,
    "health_check_timeout_ms": 5000,
}
BLOCK = """
import sys
class Block:
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"{{fullname}} is blocked", name=fullname)
sys.meta_path.insert(0, Block())
"""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude what the collection creates from garbage collection, which otherwise takes a quarter of the pure tests.

    The modules of torch and Ray and the tests themselves live to the end of the run: there is nothing to collect.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


# After so many seconds without output, a line says which test is running.
SILENCE_S = 15.0


class Progress:
    """Prints which test is running when nothing else has been printed for a while, so that no wait is silent."""

    def __init__(self) -> None:
        self._test, self._number, self._count = "collecting the tests", 0, 0
        self._began = self._shown = time.monotonic()
        self._finished = threading.Event()
        # pytest captures file descriptor 1 while a test runs.
        self._output = os.dup(1)

    def pytest_sessionstart(self) -> None:
        threading.Thread(target=self._report, daemon=True).start()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._count = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._count = len(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._test, self._number = nodeid, self._number + 1
        self._began = self._shown = time.monotonic()

    def pytest_sessionfinish(self) -> None:
        self._finished.set()

    def _report(self) -> None:
        while not self._finished.wait(1.0):
            now = time.monotonic()
            if now - self._shown >= SILENCE_S:
                self._shown = now
                line = f"\n{self._test}: {now - self._began:.0f} s [{self._number}/{self._count}]\n"
                os.write(self._output, line.encode())


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that records how long each file takes."""
    parser.addoption("--record-seconds", type=Path, help="write the seconds of each test file to this JSON file")


class Recorder:
    """Adds up the seconds that the tests of each file take, with their fixtures, and writes them to a JSON file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._seconds[file] = self._seconds.get(file, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        known = json.loads(self._path.read_text()) if self._path.exists() else {}
        known |= {file: round(seconds, 1) for file, seconds in self._seconds.items() if seconds >= 0.05}
        self._path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Show progress during long tests, and record seconds, in the process that starts the others."""
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(Progress())
    if path := config.getoption("--record-seconds"):
        config.pluginmanager.register(Recorder(path))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the modules so that what they share starts once, and so that two processes finish together.

    First come the modules that use the shared Ray, and among them those that share a group of workers. A module whose
    first test does not use Ray shuts it down, so those whose later tests use it come before all others. After that the
    modules that took longest, by `test-seconds.json`, come first: processes that test side by side take the next module
    from one queue. In a module, the tests that change its lasting group come last: what this group returns late would
    be a leak of others.
    """
    path = Path(__file__).with_name("test-seconds.json")
    seconds: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    modules: dict[pytest.Module | None, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.getparent(pytest.Module), []).append(item)

    def place(tests: list[pytest.Item]) -> tuple[int, int, float]:
        uses = [uses_fixture(item, "local_ray") for item in tests]
        kind = 1 if uses[0] else 0 if any(uses) else 2
        sharing = [item for item in tests if uses_fixture(item, "shared")]
        own_group = hasattr(getattr(sharing[0].getparent(pytest.Module), "obj", None), "SHARED") if sharing else 2
        return kind, int(own_group), -seconds.get(tests[0].nodeid.partition("::")[0], 0.0)

    def changes_lasting(item: pytest.Item) -> bool:
        return uses_fixture(item, "lasting")

    ordered = sorted(modules.values(), key=place)
    items[:] = [item for tests in ordered for item in sorted(tests, key=changes_lasting)]


def uses_fixture(item: pytest.Item, name: str) -> bool:
    """Return whether a test uses a fixture, also through another one."""
    return name in getattr(item, "fixturenames", ())


class LocalRay:
    """The local Ray that test modules share. Starting Ray occupies all processors for several seconds."""

    def __init__(self) -> None:
        self._session = ""

    def _is_running(self) -> bool:
        ray = sys.modules.get("ray")
        return bool(
            ray
            and self._session
            and ray.is_initialized()
            and ray.get_runtime_context().get_session_name() == self._session
        )

    def ensure(self) -> None:
        """Start the local Ray, unless it is running, with 16 logical CPUs and 4 logical GPUs."""
        if self._is_running():
            return
        import ray

        ray.init(address="local", num_cpus=16, num_gpus=4, include_dashboard=False, logging_level="warning")
        self._session = ray.get_runtime_context().get_session_name()

    def end(self) -> None:
        """Shut the local Ray down if it is running."""
        if self._is_running():
            sys.modules["ray"].shutdown()
        self._session = ""


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[LocalRay]:
    """Return the local Ray of this test run, which ends with the run."""
    shared = LocalRay()
    yield shared
    shared.end()


class SharedGroup:
    """The group of workers that modules of one test process share, with its class and axes; at most one at a time."""

    def __init__(self) -> None:
        self._resources = contextlib.ExitStack()
        self._wanted: object = None
        self._group: Any = None

    def ensure(self, wanted: object, start: Callable[[contextlib.ExitStack], Any]) -> Any:
        """Return the group, given what tells it from others, and a function that starts it."""
        if self._group is None or self._wanted != wanted:
            self.end()
            self._group, self._wanted = start(self._resources), wanted
        return self._group

    def end(self) -> None:
        """Shut the group down, if there is one."""
        self._group = None
        self._resources.close()


@pytest.fixture(scope="session")
def shared_group(shared_ray: LocalRay) -> Iterator[SharedGroup]:
    """Yield the holder of the group that modules share."""
    holder = SharedGroup()
    yield holder
    holder.end()


@pytest.fixture(scope="module", autouse=True)
def nothing_of_another_module(request: pytest.FixtureRequest, shared_ray: LocalRay, shared_group: SharedGroup) -> None:
    """Shut down what modules share before one that does not use it: the group of workers, and the local Ray."""
    tests = [item for item in request.session.items if item.getparent(pytest.Module) is request.node]
    if not any(uses_fixture(item, "shared") for item in tests):
        shared_group.end()
    if not uses_fixture(tests[0], "local_ray"):
        shared_ray.end()


@pytest.fixture(scope="module")
def local_ray(shared_ray: LocalRay) -> None:
    """Start a Ray with 16 logical CPUs and 4 logical GPUs.

    A test that shuts this Ray down must be the last one of its module that uses the fixture.
    """
    shared_ray.ensure()


@pytest.fixture(scope="module")
def shared_cluster(local_ray: None, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yield a logical node for the tests of a module; its `SLOTS` is the number of CPU slots."""
    from fairlead_placement import RayVirtualCluster

    with RayVirtualCluster([request.module.SLOTS], use_gpus=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def slots(shared_cluster: Any) -> Any:
    """Return the slots of `shared_cluster`."""
    return shared_cluster.slots()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that a test that uses Ray neither loses nor leaks resources.

    For the tests that change the group of the fixture `lasting` in turn, that fixture checks it.
    """
    if "local_ray" in request.fixturenames:
        request.getfixturevalue("local_ray")
    if "ray" not in sys.modules or "lasting" in request.fixturenames:
        yield
        return
    from fairlead_placement.testing import assert_no_leaks

    with assert_no_leaks(timeout_s=60):
        yield


@pytest.fixture
def run_readme() -> Callable[[Path], int]:
    """Run the python blocks of a short README in order, and compare the values in their comments.

    A line `expression  # value` says that the expression has the value. The fixture returns how many there were.
    """

    def run(readme: Path) -> int:
        text = readme.read_text(encoding="utf-8")
        assert len(text.splitlines()) < 150
        blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
        assert blocks
        scope: dict[str, object] = {}
        compared = 0
        for block in blocks:
            for statement in ast.parse(block).body:
                source = ast.get_source_segment(block, statement) or ""
                comment = block.splitlines()[(statement.end_lineno or 0) - 1][statement.end_col_offset :].strip()
                if isinstance(statement, ast.Expr) and comment.startswith("# "):
                    assert repr(eval(source, scope)) == comment.removeprefix("# "), source
                    compared += 1
                else:
                    exec(source, scope)
        return compared

    return run


@contextlib.contextmanager
def start_raylets(
    head: Mapping[str, Any], workers: Sequence[Mapping[str, Any]] = (), *, quick_deaths: bool = False, **options: Any
) -> Iterator[Any]:
    """Start a cluster of several raylets on this machine, and attach this process to it.

    Args:
        head: the resources of the head, as arguments of `Cluster.add_node`.
        workers: the resources of each further node, in the order in which the nodes start.
        quick_deaths: whether Ray declares a node dead within about a second.
        options: how to attach, as arguments of `ray.init`.
    """
    import ray
    from ray.cluster_utils import Cluster

    system = {"_system_config": QUICK_DEATHS} if quick_deaths else {}
    # A short path, because Ray creates sockets in this folder.
    folder = tempfile.mkdtemp(prefix="fl-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        # Options of `ray start`: processes that no test needs, each of which takes a second of a processor.
        quiet = {"no_monitor": True, "include_dashboard": False, "include_log_monitor": False}
        cluster = Cluster(initialize_head=True, head_node_args={**quiet, **head, **system})
        try:
            for worker in workers:  # One after the other: several at once time out on a small machine.
                cluster.add_node(**worker)
                cluster.wait_for_nodes()
            ray.init(address=cluster.address, **options)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def raylets() -> Callable[..., contextlib.AbstractContextManager[Any]]:
    """Return `start_raylets`."""
    return start_raylets


@pytest.fixture(scope="module")
def only_head() -> Iterator[Any]:
    """Start a head without room, for all tests of a module."""
    with start_raylets({"num_cpus": 0}, quick_deaths=True, logging_level="error", log_to_driver=False) as cluster:
        yield cluster


@pytest.fixture
def joining(only_head: Any, eventually: Callable[..., bool]) -> Iterator[Any]:
    """Return a head without room. The nodes that a test adds are removed after it."""
    import ray

    yield only_head
    for node in list(only_head.worker_nodes):
        only_head.remove_node(node, allow_graceful=False)
    assert eventually(lambda: sum(row["Alive"] for row in ray.nodes()) == 1, 60)


def find_unused_port() -> int:
    """Return a port that nobody uses or has just used, and that no other process gets by chance."""
    for port in random.sample(range(20000, 30000), 100):  # The system and Ray choose theirs elsewhere.
        # A plain bind, which a connection of a server that has just ended refuses for a minute.
        with contextlib.suppress(OSError), socket.socket() as bound:
            bound.bind(("", port))
            return port
    pytest.fail("100 ports of 20000-29999 are in use")


@pytest.fixture(scope="module")
def unused_port() -> int:
    """Return `find_unused_port()`, another one for each module: the last one's connections may linger."""
    return find_unused_port()


@pytest.fixture(scope="session")
def coordinator_port() -> Iterator[str]:
    """Set `COORD_PORT`, the port of the coordinator of several TPU slices, to one that no other test uses."""
    with pytest.MonkeyPatch.context() as patch:
        port = str(find_unused_port())
        patch.setenv("COORD_PORT", port)
        yield port


@pytest.fixture(scope="session")
def eventually() -> Callable[..., bool]:
    """Return a function that waits until a condition holds, and returns whether it came to hold in time."""

    def wait(holds: Callable[[], object], timeout_s: float = 60.0) -> bool:
        deadline = time.monotonic() + timeout_s
        while not (held := holds()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return bool(held)

    return wait


@contextlib.contextmanager
def stop_for_a_while(pid: int) -> Iterator[Callable[[], None]]:
    """Stop a process (SIGSTOP), wait until it has stopped, and continue it at the end.

    `os.kill` returns before the process has stopped: on a busy machine it still answers requests for a while.

    Yields:
        A function that continues the process earlier.
    """

    def resume() -> None:
        os.kill(pid, signal.SIGCONT)

    os.kill(pid, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + 60
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            if time.monotonic() >= deadline:
                raise TimeoutError(f"process {pid} has not stopped within 60 s of SIGSTOP")
            time.sleep(0.001)
        yield resume
    finally:
        resume()


@pytest.fixture(scope="session")
def stop_process() -> Callable[[int], contextlib.AbstractContextManager[Callable[[], None]]]:
    """Return `stop_for_a_while`."""
    return stop_for_a_while


@pytest.fixture(scope="session")
def agent_pids() -> Callable[..., list[int]]:
    """Return a function that returns the processes of the node agents of this cluster, or those of some nodes."""

    def find(*node_ids: str) -> list[int]:
        import psutil
        import ray

        wanted = {f"--node_id={one}" for one in node_ids or [row["NodeID"] for row in ray.nodes()]}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has just ended
                if process.name() == "raylet" and wanted.intersection(process.cmdline()):
                    found += [one for one in process.children() if one.status() != psutil.STATUS_ZOMBIE]
        pids = []
        for child in found:
            with contextlib.suppress(psutil.Error):
                if " ".join(child.cmdline()).startswith("ray::NodeAgent"):
                    pids.append(child.pid)
        return sorted(pids)

    return find


@pytest.fixture(scope="session")
def in_container() -> Callable[..., list[str]]:
    """Return a function that returns a command which runs another one in a pid namespace of its own."""
    prefix = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    prefix += [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("there are no namespaces of processes here")
    return lambda *command: [*prefix, *command]


@pytest.fixture(scope="session")
def call_in_time() -> Callable[..., dict[str, Any]]:
    """Return a function that calls functions all at once, and returns what each returned or raised, by name.

    It fails if one takes 2 s longer than `within_s`, not counting the time by which the machine delayed a thread that
    sleeps meanwhile.
    """

    def call_all(calls: Mapping[str, Callable[[], object]], within_s: float) -> dict[str, Any]:
        outcomes: dict[str, Any] = {}
        took: dict[str, float] = {}
        began = time.monotonic()

        def call(name: str, function: Callable[[], object]) -> None:
            try:
                outcomes[name] = function()
            except BaseException as error:  # noqa: BLE001  it is what the test looks at
                outcomes[name] = error
            took[name] = time.monotonic() - began

        for name, function in calls.items():
            threading.Thread(target=call, args=(name, function), name=name, daemon=True).start()
        ticks = 0
        while len(took) < len(calls) and time.monotonic() < began + within_s + 60:
            time.sleep(0.01)
            ticks += 1
        late_s = time.monotonic() - began - ticks * 0.01
        assert not calls.keys() - took.keys(), f"still running: {sorted(calls.keys() - took.keys())}"
        limit_s = within_s + 2 + late_s
        assert not (slow := {name: one for name, one in took.items() if one > limit_s}), f"{slow} > {limit_s}"
        return outcomes

    return call_all


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs a script in a fresh interpreter, and returns its output.

    The interpreter cannot import the modules in `block`, and has the further variables that are given.
    """

    def run(script: str, block: Collection[str] = (), **env: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", BLOCK.format(names=tuple(block)) + textwrap.dedent(script)],
            cwd=tmp_path,
            env={**os.environ, **env},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=300,
        ).stdout

    return run


@pytest.fixture(scope="session")
def read_imports() -> Callable[[Path], set[str]]:
    """Return a function that reads the names of the top-level packages that a module imports, without relative ones."""

    def read(module: Path) -> set[str]:
        names: set[str] = set()
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module or "")
        return {name.partition(".")[0] for name in names}

    return read


# Python runs handlers when one of these instructions has been executed, and when a function begins.
LETS_HANDLERS_RUN = ("CALL", "JUMP_BACKWARD", "RESUME")


class Interrupter:
    """Raises a signal at one moment of a run.

    Args:
        number: the signal.
        files: the ends of the names of the files whose code is interrupted.
        moment: at which of the moments of these files, from 0.
    """

    def __init__(self, number: int, files: tuple[str, ...], moment: int) -> None:
        self._number = number
        self._files = files
        self._left = moment
        self._last: dict[FrameType, int] = {}
        self.has_raised = False

    def __enter__(self) -> "Interrupter":
        # Python 3.12 has events for opcodes only if a frame wants them when the trace begins.
        if (here := inspect.currentframe()) is not None:
            here.f_trace_opcodes = True
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.endswith(self._files):
            return None
        # Python 3.13 needs it here already: otherwise the first run of a function has no events.
        frame.f_trace = self._trace_opcode
        frame.f_trace_opcodes = True
        return self._trace_opcode

    def _trace_opcode(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode" and not self.has_raised:
            last, self._last[frame] = self._last.get(frame), frame.f_lasti
            if last is not None and _names(frame.f_code).get(last, "").startswith(LETS_HANDLERS_RUN):
                if not self._left:
                    self.has_raised = True
                    signal.raise_signal(self._number)
                self._left -= 1
        return self._trace_opcode


@cache
def _names(code: CodeType) -> dict[int, str]:
    return {one.offset: one.opname for one in dis.get_instructions(code)}


def run_interrupted(run: Callable[[], object], number: int, *files: str) -> int:
    """Run a function again and again, each time with a signal at the next moment of the code of some files.

    The function has to handle what the handler of the signal raises, and to check what must hold afterwards.

    Returns:
        The number of moments.
    """
    moment = 0
    while True:
        with Interrupter(number, files, moment) as interrupter:
            run()
        if not interrupter.has_raised:
            return moment
        moment += 1


@pytest.fixture(scope="session")
def interrupter() -> type[Interrupter]:
    """Return `Interrupter`."""
    return Interrupter


@pytest.fixture(scope="session")
def interrupt_everywhere() -> Callable[..., int]:
    """Return `run_interrupted`."""
    return run_interrupted


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """Yield the path of a file that workers wait for. It is created at the end of the test at the latest."""
    path = tmp_path / "gate"
    yield path
    path.touch()


class Clock:
    """The clock of modules of this process, in place of `time`, which a test can set forward."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_s

    def skip(self, seconds: float) -> None:
        """Let this time pass at once."""
        self._ahead_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of this process's deadlines, so that a test reaches one at an event and not after a time."""
    made = Clock()
    if "fairlead_workergroup._start.launch" in sys.modules:
        monkeypatch.setattr("fairlead_workergroup._start.launch.time", made)
    if "fairlead_workergroup._world" in sys.modules:
        monkeypatch.setattr("fairlead_workergroup._world.RealWorld.now", made.monotonic)
    return made


@pytest.fixture(scope="session")
def store_used() -> Callable[[], int]:
    """Return a function that returns the bytes in use by the object store's own count."""
    import ray
    from ray._private.internal_api import node_stats

    def count() -> int:
        (node,) = [one for one in ray.nodes() if one["Alive"]]
        reply = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
        return int(reply.store_stats.object_store_bytes_used)

    return count


@pytest.fixture(scope="session")
def wait_until_running(eventually: Callable[..., bool]) -> Callable[..., None]:
    """Return a function that waits until the given ranks of a group run a method."""

    def wait(group: Any, method: str, *ranks: int) -> None:
        def methods() -> list[str | None]:
            statuses = group.get_worker_status()
            return [statuses[rank].method for rank in ranks]

        assert eventually(lambda: methods() == [method] * len(ranks), 60), methods()

    return wait
