# SPDX-License-Identifier: Apache-2.0
"""Try on GPUs, TPUs and several machines what was developed on CPUs, and print a report to paste into an issue.

nox -s hardware                       what this machine has
RAY_ADDRESS=auto nox -s hardware      what the cluster has that runs here: start Ray on each machine first
nox -s hardware -- --rehearse         the rows on CPUs, with gloo: tries this program, and says nothing about hardware

A row that needs what is not there is skipped, and the report says what was missing. A row that fails does not stop the
others. Each has a deadline, and removes what it started.
"""

import argparse
import importlib.metadata
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# Seconds for a call of a row, in which NCCL starts for the first time.
DEADLINE_S = 300.0
MOST_WORKERS = 8


class Skipped(Exception):
    """What a row needs is not there."""


@dataclass(frozen=True)
class Site:
    """What the cluster has, by the address of the node."""

    gpus: dict[str, int] = field(default_factory=dict)
    tpus: dict[str, int] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    rehearse: bool = False

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    def count_gpus(self, least: int) -> int:
        """Return how many GPUs of one node a row uses; raise Skipped if no node has enough."""
        most = max(self.gpus.values(), default=0)
        if most < least:
            raise Skipped(f"needs {least} GPU{'s' * (least > 1)} in one machine, found {most}")
        return min(most, MOST_WORKERS)


class Rank:
    """A worker that runs the torch half of the rows."""

    def __init__(self, device: str) -> None:
        self.device = device

    def describe(self) -> tuple[str, int, str]:
        """Return the id of the device that torch uses, how many it sees, and the variable that limits them."""
        import os

        import torch

        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if self.device == "cpu":
            return visible, len(visible.split(",")), visible
        return str(torch.cuda.get_device_properties(0).uuid), torch.cuda.device_count(), visible

    def join(self) -> str:
        """Join the group's workers over NCCL, or gloo on CPUs, and return the backend."""
        import torch.distributed as dist

        from fairlead_workergroup.torch import init_process_group

        init_process_group("gloo" if self.device == "cpu" else "nccl")
        return str(dist.get_backend())

    def reduce(self, megabytes: int, times: int) -> tuple[float, float]:
        """Return the sum that a reduction over all ranks gives, and the seconds of one, after a first one."""
        import time

        import torch
        import torch.distributed as dist

        value = torch.ones(megabytes * 2**20 // 4, device=self.device)
        dist.all_reduce(value)
        total = float(value[0])
        began = time.perf_counter()
        for _ in range(times):
            dist.all_reduce(value)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return total, (time.perf_counter() - began) / times

    def train(self, late: int) -> None:
        """Reduce once more, where one rank never comes."""
        from fairlead_workergroup import current_worker

        if current_worker().rank == late:
            self.wait_for_data()
        self.reduce(1, 1)

    def wait_for_data(self) -> None:
        """Wait for something that does not come."""
        import queue

        queue.Queue[None]().get()

    def fill(self, value: float, rows: int, columns: int) -> None:
        import torch

        self.weight = torch.full((rows, columns), value, device=self.device)

    def weights(self) -> dict[str, Any]:
        return {"w": self.weight}

    def mean(self) -> float:
        return float(self.weight.mean())

    def leave(self) -> None:
        from fairlead_workergroup.torch import destroy

        destroy()


class Host:
    """A worker that runs the JAX half of the rows."""

    def count(self) -> tuple[str, int, float]:
        """Return the platform of the devices, how many there are, and a sum over them."""
        import jax
        import jax.numpy as jnp

        count = jax.local_device_count()
        total = jax.pmap(lambda x: jax.lax.psum(x, "hosts"), axis_name="hosts")(jnp.ones((count,)))
        return jax.devices()[0].platform, count, float(total[0])


def start(site: Site, workers: int) -> Any:
    """Start workers with a GPU each on one node."""
    from fairlead_workergroup import launch

    return launch(Rank, workers=workers, init_args=(site.device,), gpus_per_worker=1, timeout_s=DEADLINE_S)


def expect(condition: bool, found: object) -> None:
    if not condition:
        raise AssertionError(f"unexpected result: {found}")


def show_devices(site: Site) -> str:
    count = site.count_gpus(1)
    with start(site, count) as group:
        seen = group.call("describe").result(DEADLINE_S)
    expect({one[1] for one in seen} == {1} and len({one[0] for one in seen}) == count, seen)
    return f"{count} workers see one GPU each, none of them twice"


def reduce_with_nccl(site: Site) -> str:
    count = site.count_gpus(2)
    with start(site, count) as group:
        (backend,) = set(group.call("join").result(DEADLINE_S))
        results = group.call("reduce", 64, 20).result(DEADLINE_S)
        group.call("leave").result(DEADLINE_S)
    expect({total for total, _ in results} == {float(count)}, results)
    slowest = max(seconds for _, seconds in results)
    return f"{count} ranks over {backend}: 64 MiB reduced in {slowest * 1e3:.2f} ms"


def find_late_rank(site: Site) -> str:
    """Let all ranks but one spin in a reduction, and ask `why` which rank they wait for."""
    import ray

    count = site.count_gpus(2)
    with start(site, count) as group:
        group.call("join").result(DEADLINE_S)
        group.call("reduce", 1, 1).result(DEADLINE_S)
        group.call("train", 1, discard=True)
        time.sleep(15)
        command = [sys.executable, "-m", "fairlead_inspect", "why", "--after", "5", "--timeout", "30"]
        command += ["--address", ray.get_runtime_context().gcs_address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    expect(done.returncode == 1 and "wait_for_data" in done.stdout, f"{done.stdout}\n{done.stderr}")
    return f"`why` names rank 1 of {count}, which waits for data"


def send_weights(site: Site) -> str:
    """Send the tensors of one group to another over each way that the link chooses by itself."""
    from fairlead_transfer import Link

    site.count_gpus(2)
    with (
        start(site, 1) as source,
        start(site, 1) as target,
        Link(source, target, source="weights", target="weights") as link,
    ):
        return send(link, source, target)


def send(link: Any, source: Any, target: Any) -> str:
    rows, columns = 8192, 8192  # 256 MiB
    target.call("fill", 0.0, rows, columns).result(DEADLINE_S)
    seconds = []
    for version in (1, 2, 3):
        source.call("fill", float(version), rows, columns).result(DEADLINE_S)
        began = time.perf_counter()
        report = link.send(version, timeout=DEADLINE_S)
        seconds.append(time.perf_counter() - began)
        means = target.call("mean").result(DEADLINE_S)
        expect(set(means) == {float(version)}, means)
    return f"256 MiB by {', '.join(sorted(set(report.transports)))} in {min(seconds[1:]) * 1e3:.0f} ms"


def cross_machines(site: Site) -> str:
    """Let a group span two machines, reduce between them, and send weights from one to the other."""
    from fairlead_placement import RayVirtualCluster
    from fairlead_transfer import Link
    from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup

    if len(set(site.nodes)) < 2:
        raise Skipped(f"needs two machines in one cluster (RAY_ADDRESS), found {len(set(site.nodes))}")
    device = "cuda" if len(site.gpus) > 1 else "cpu"
    with RayVirtualCluster([1, 1], use_gpus=device == "cuda", placement_group_strategy="STRICT_SPREAD") as cluster:
        with RayWorkerGroup(cluster, RayWorkerBuilder(Rank, device)) as group:
            (backend,) = set(group.call("join").result(DEADLINE_S))
            results = group.call("reduce", 64, 5).result(DEADLINE_S)
            group.call("leave").result(DEADLINE_S)
        expect({total for total, _ in results} == {2.0}, results)
        first, second = cluster.slots()
        with (
            RayWorkerGroup([first], RayWorkerBuilder(Rank, device)) as source,
            RayWorkerGroup([second], RayWorkerBuilder(Rank, device)) as target,
            Link(source, target, source="weights", target="weights") as link,
        ):
            sent = send(link, source, target)
    slowest = max(seconds for _, seconds in results)
    return f"64 MiB reduced over {backend} in {slowest * 1e3:.1f} ms; {sent}"


def use_tpu_host(site: Site) -> str:
    from fairlead_placement import RayVirtualCluster
    from fairlead_workergroup import RayWorkerGroup

    if not site.tpus:
        raise Skipped("needs a host with TPUs, found none")
    chips = max(site.tpus.values())
    with (
        RayVirtualCluster([1], use_gpus=False, accelerators={"TPU": chips}) as cluster,
        RayWorkerGroup(cluster, Host) as group,
    ):
        ((name, count, total),) = group.call("count").result(DEADLINE_S)
    expect(name == "tpu" and total == count, (name, count, total))
    return f"a worker sees {count} TPU devices, and sums over them"


@dataclass(frozen=True)
class Row:
    """What is tried, what it needs, the function that tries it, and on which hardware it has passed so far."""

    what: str
    needs: str
    run: Callable[[Site], str]
    passed_on: str = "not yet"


ROWS = (
    Row("devices that workers see", "a GPU", show_devices, "one H200"),
    Row("NCCL between GPUs with `init_process_group`", "two GPUs", reduce_with_nccl),
    Row("ranks that spin under NCCL, and `why`", "two GPUs", find_late_rank),
    Row("a link between the GPUs of two groups", "two GPUs", send_weights),
    Row("a group and a link across machines", "two machines", cross_machines),
    Row("a worker on a TPU host, with JAX", "a TPU host", use_tpu_host),
)


def look_around(rehearse: bool) -> Site:
    """Connect to Ray, and return what the cluster has."""
    import ray

    from fairlead_placement import init_ray

    if rehearse:
        init_ray(address="local", num_cpus=8, num_gpus=2)
    else:
        init_ray()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    found = {
        name: {node["NodeManagerAddress"]: int(node["Resources"][name]) for node in nodes if name in node["Resources"]}
        for name in ("GPU", "TPU")
    }
    return Site(found["GPU"], found["TPU"], tuple(node["NodeManagerAddress"] for node in nodes), rehearse)


def describe_versions() -> str:
    """Return one line with the system and the versions that a reader of the report needs."""
    names = ("ray", "torch", "jax", "fairlead-workergroup", "fairlead-transfer", "fairlead-inspect")
    versions = []
    for name in names:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    return f"{platform.platform()}, Python {platform.python_version()}, {', '.join(versions)}"


def describe_gpus() -> str:
    """Return the models of the GPUs of this machine and their driver, as `nvidia-smi` prints them."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return "no NVIDIA GPU on this machine"
    return "; ".join(f"{lines.count(line)} x {line}" for line in dict.fromkeys(lines))


def main() -> int:
    """Run the rows, print the report, and return 1 if a row failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="run the rows on CPUs, with two pretended GPUs")
    options = parser.parse_args()
    site = look_around(options.rehearse)
    lines, traces = [], []
    for row in ROWS:
        began = time.perf_counter()
        try:
            result = f"ok: {row.run(site)}"
        except Skipped as reason:
            result = f"skipped: {reason}"
        except Exception as error:
            result = f"FAILED: {type(error).__name__}, below"
            traces.append(f"{row.what}\n{traceback.format_exc()}")
        lines.append(f"| {row.what} | {result} | {time.perf_counter() - began:.0f} s |")
        print(lines[-1], file=sys.stderr, flush=True)
    what = "Rehearsed on CPUs: this says nothing about hardware" if site.rehearse else describe_gpus()
    print(f"\n{describe_versions()}\n{what}\n\n| what | result | time |\n|---|---|---|")
    print("\n".join([*lines, *traces]))
    return 1 if traces else 0


if __name__ == "__main__":
    sys.exit(main())
