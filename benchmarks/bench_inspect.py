# SPDX-License-Identifier: Apache-2.0
"""Measure looks at 64 real actors on 8 raylets of this machine, and how much a look slows a loop of collectives.

python benchmarks/bench_inspect.py
"""

import contextlib
import json
import os
import queue
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import ray
from _measure import Row, Timing, table, under
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fairlead_placement import init_ray

NODES, PER_NODE = 8, 8
# The rank that all others wait for.
LATE = 37
# Looking processes, and looks of each of them after its first.
ROUNDS, MORE_LOOKS = 5, 4
RANKS = 2
# Turns of the loop with and without a look. They are short, so that other work on this machine affects both of a pair.
PAIRS, TURN_S, BEFORE_S = 30, 6.0, 1.0
# One look in this time, for which the slowdown of a turn is counted.
EVERY_S = 30.0


class Waiting:
    """A rank that waits for another one, without torch, of which 64 processes would not fit this machine."""

    def __init__(self, rank: int, size: int) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")

    def pid(self) -> int:
        return os.getpid()

    def hang(self) -> None:
        queue.Queue[None]().get()

    def wait(self, refs: list[Any]) -> None:
        ray.get(refs)


class Trainer:
    """A rank of a loop of collectives."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))

    def join(self) -> int:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return os.getpid()

    def train(self, until: str) -> list[float]:
        """Reduce until a file is there, and return when each step was over."""
        import torch
        import torch.distributed as dist

        over, ends, gradients = [], torch.zeros(1), torch.ones(65_536)
        while not ends.item():
            time.sleep(0.005)  # as for a device
            dist.all_reduce(gradients)
            ends.fill_(os.path.exists(until))
            dist.all_reduce(ends)
            gradients.fill_(1.0)
            over.append(time.time())
        return over


class Looker:
    """A process that looks at a job when it is told to."""

    def __init__(self, address: str, job: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("_looks.py")), address, job]
        self.began = time.perf_counter()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.attached_s = self._read()["attached_s"]

    def look(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"the looking process has exited with {self.process.wait()}")

    def close(self) -> None:
        self.process.communicate()


def rows() -> list[Row]:
    """Return every row of the table. The run takes ten minutes."""
    return [*look_rows(), *loop_rows()]


def look_rows() -> Iterator[Row]:
    """Look at actors on several raylets of this machine, each time from a new process and then again from it."""
    count = NODES * PER_NODE
    first: list[float] = []
    more: list[float] = []
    commands: list[float] = []
    cpu: list[float] = []
    peak_mb, complete = 0.0, 0
    with _start_raylets() as address:
        refs = _start_waiting(count)
        job = ray.get_runtime_context().get_job_id()
        time.sleep(5.0)  # the task events of a call arrive within a second, and a busy machine needs longer
        before = _read_cpu_and_time()
        time.sleep(5.0)
        spent, took = _subtract(before, _read_cpu_and_time())
        others = spent / took
        for _ in range(ROUNDS):
            with contextlib.closing(Looker(address, job)) as looker:
                before = _read_cpu_and_time()
                answers = [looker.look()]
                commands.append(time.perf_counter() - looker.began)
                spent, took = _subtract(before, _read_cpu_and_time())
                cpu.append(spent - others * took)
                answers += [looker.look() for _ in range(MORE_LOOKS)]
            first.append(looker.attached_s + answers[0]["took_s"])
            more += [one["took_s"] for one in answers[1:]]
            peak_mb = max(peak_mb, *(one["peak_mb"] for one in answers))
            # The driver is one more.
            complete += sum(one["read"] == count + 1 and one["blamed"] == [["late", [LATE]]] for one in answers)
        assert not ray.wait(refs, timeout=0)[0]
    what = f"first look at {count} actors on {NODES} raylets of this machine"
    yield Row(f"{what}, with attaching", _spread(first), "each under 5 s", max(first) < 5.0)
    yield Row("  with the start of the process and its imports", _spread(commands), "", True)
    what = "  its CPU on all nodes together, without what Ray and the actors need anyway"
    yield Row(what, _spread(cpu), "", True)
    yield Row("  the next looks of the same process", _spread(more), "", True)
    worst = max(more) - 1.0
    yield under("  of the worst, without the second between its snapshots", f"{worst:.2f} s", worst, 1.5)
    yield Row("  peak memory of the looking process", f"{peak_mb:.0f} MB", "under 300 MB", peak_mb < 300)
    looks = len(first) + len(more)
    what = f"  looks that read all of them and blame rank {LATE} alone"
    yield Row(what, f"{complete} of {looks}", "all", complete == looks)


@contextlib.contextmanager
def _start_raylets() -> Iterator[str]:
    node = {"num_cpus": 1, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for _ in range(NODES - 1):
            cluster.add_node(**node)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, logging_level="error", log_to_driver=False)
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


def _start_waiting(count: int) -> list[Any]:
    """Start actors that wait for one of them, a few on each node, and return their calls."""
    nodes = [row["NodeID"] for row in ray.nodes() if row["Alive"]]
    actor = ray.remote(num_cpus=0)(Waiting)
    actors = []
    for rank in range(count):
        where = NodeAffinitySchedulingStrategy(nodes[rank % len(nodes)], soft=False)
        actors.append(actor.options(scheduling_strategy=where).remote(rank, count))
        if rank % NODES == NODES - 1:
            ray.get([one.pid.remote() for one in actors])
    late = actors[LATE].hang.remote()
    return [late, *(one.wait.remote([late]) for rank, one in enumerate(actors) if rank != LATE)]


def loop_rows() -> Iterator[Row]:
    """Compare the steps of a loop of collectives with and without a look, in turns."""
    init_ray(address="local", num_cpus=2 * RANKS)
    context = ray.get_runtime_context()
    until = Path(os.environ.get("RAY_TMPDIR", "/tmp"), f"until-{os.getpid()}")
    try:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        actor = ray.remote(num_cpus=1)(Trainer)
        actors: list[Any] = [actor.remote(rank, RANKS, port) for rank in range(RANKS)]
        pids = ray.get([one.join.remote() for one in actors])
        refs = [one.train.remote(str(until)) for one in actors]
        with contextlib.closing(Looker(context.gcs_address, context.get_job_id())) as looker:
            for _ in range(2):  # the first ones start processes
                looker.look()
            time.sleep(5.0)
            turns, cpu, took = _take_turns(looker, {os.getpid(), *pids})
        until.touch()
        over = ray.get(refs)[0]
    finally:
        ray.shutdown()
        until.unlink(missing_ok=True)
    plain, slower = [], []
    for (began, ended), (look_began, look_ended) in turns:
        plain.append(_mean_step(over, began, ended))
        ratio = _mean_step(over, look_began, look_ended) / plain[-1]
        slower.append(1.0 + (ratio - 1.0) * (look_ended - look_began) / EVERY_S)
    base, ratios = Timing.of(plain), Timing.of(slower)
    yield Row(f"step of {RANKS} ranks: 5 ms of waiting, as for a device, and gloo", str(base), "", True)
    what = f"  with one look every {EVERY_S:g} s, by {len(turns)} pairs of turns"
    measured = f"{ratios.median:.3f}x ({ratios.low:.3f} to {ratios.high:.3f})"
    yield Row(what, measured, "under 1.02x", ratios.median < 1.02)
    yield Row("  CPU of a look, beside the ranks and the driver", f"{statistics.median(cpu):.2f} s", "", True)
    yield Row("  time of a look", _spread(took), "", True)


def _take_turns(
    looker: Looker, apart: Collection[int]
) -> tuple[list[tuple[tuple[float, float], tuple[float, float]]], list[float], list[float]]:
    """Return when the turns without and with a look began and ended in pairs, and the CPU and time of the looks."""
    pairs, cpu, took = [], [], []
    for _ in range(PAIRS):
        turns = {}
        spent = {}
        for looks in random.sample((False, True), 2):
            before, began = _read_cpu(apart), time.time()
            time.sleep(BEFORE_S)
            if looks:
                took.append(looker.look()["took_s"])
            time.sleep(max(0.0, began + TURN_S - time.time()))
            ended = time.time()
            turns[looks], spent[looks] = (began, ended), _read_cpu(apart) - before
        pairs.append((turns[False], turns[True]))
        lengths = {looks: ended - began for looks, (began, ended) in turns.items()}
        cpu.append(spent[True] - spent[False] * lengths[True] / lengths[False])
    return pairs, cpu, took


def _read_cpu(apart: Collection[int]) -> float:
    """Return the CPU seconds of all processes here and below, and of their children that have exited, but for some."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    below = [os.getpid()]
    for at in below:
        below += [pid for pid, parent in parents.items() if parent == at]
    return sum(ticks[pid] for pid in below if pid not in apart) / os.sysconf("SC_CLK_TCK")


def _read_cpu_and_time() -> tuple[float, float]:
    return _read_cpu(()), time.perf_counter()


def _subtract(before: tuple[float, float], after: tuple[float, float]) -> tuple[float, float]:
    return after[0] - before[0], after[1] - before[1]


def _mean_step(over: list[float], began: float, ended: float) -> float:
    inside = [at for at in over if began <= at < ended]
    return (inside[-1] - inside[0]) / (len(inside) - 1)


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


if __name__ == "__main__":
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    print(table(rows()))
