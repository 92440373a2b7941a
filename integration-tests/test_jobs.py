# SPDX-License-Identifier: Apache-2.0
"""Two jobs of one user on one cluster, each in a Ray namespace of its own, whose groups have the same name."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import RayWorkerGroup, WorkerGroupError, attach

DRIVER = """
    import os, sys
    import ray
    ray.init(address=sys.argv[1], namespace=sys.argv[2], log_to_driver=False, logging_level="error")
    from fairlead_placement import RayVirtualCluster
    from fairlead_workergroup import RayWorkerGroup

    class Worker:
        def pid(self):
            return os.getpid()

    with RayVirtualCluster([2], use_gpus=False) as cluster:
        with RayWorkerGroup(cluster, Worker, name_prefix="policy") as group:
            job_id, pids = ray.get_runtime_context().get_job_id(), group.call("pid").result()
            print("GROUP", job_id, group.handle().group_id, group.master_port, *pids, flush=True)
            sys.stdin.readline()
            print("GROUP", *group.call("pid").result(), flush=True)
"""


class Job:
    """A driver of one job, and what it has printed about its group."""

    def __init__(self, namespace: str) -> None:
        address = ray.get_runtime_context().gcs_address
        command = [sys.executable, "-c", textwrap.dedent(DRIVER), address, namespace]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        job_id, group_id, port, *pids = self.words()
        self.job_id, self.group_id, self.port, self.pids = job_id, group_id, int(port), [int(pid) for pid in pids]

    def words(self) -> list[str]:
        """Return the words of the next line about its group; Ray prints lines of its own."""
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline().split())[:1] != ["GROUP"]:
            assert line, f"the driver has ended with {self.process.wait(60)}"
        return line[1:]

    def finish(self) -> None:
        """Let it call its workers again, and end."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert [int(pid) for pid in self.words()] == self.pids
        assert self.process.wait(60) == 0


@pytest.fixture
def jobs(local_ray: None) -> Iterator[Callable[[str], Job]]:
    """Return a function that starts a job in a namespace. Those that a test leaves running are killed."""
    started: list[Job] = []

    def start(namespace: str) -> Job:
        started.append(Job(namespace))
        return started[-1]

    yield start
    for job in started:
        job.process.kill()
        job.process.communicate()


def agents_of(job: Job) -> list[str]:
    names = [row["name"] for row in ray.util.list_named_actors(all_namespaces=True)]
    return [name for name in names if f"-{job.job_id}-" in name]


class Worker:
    def nothing(self) -> None:
        pass


def test_two_jobs(jobs: Callable[[str], Job], eventually: Callable[..., bool]) -> None:
    """Neither meets names, ports or agents of the other one, and what a killed one leaves serves the next one."""
    free = ray.available_resources()["CPU"]
    one, other = jobs("one"), jobs("other")
    assert one.port != other.port
    assert not set(one.pids) & set(other.pids)
    assert [len(agents_of(job)) for job in (one, other)] == [1, 1]

    # From a third job in a third namespace: a name that several groups have says so, and an id finds one of them.
    with pytest.raises(WorkerGroupError, match="several") as several:
        attach("policy")
    assert all(job.group_id[:6] in str(several.value) for job in (one, other))
    for job in (one, other):
        assert attach(job.group_id[:12]).call("pid").result() == job.pids
    listed = subprocess.run(
        [
            sys.executable,
            "-m",
            "fairlead_inspect",
            "ps",
            "--json",
            "--timeout",
            "60",
            "--address",
            ray.get_runtime_context().gcs_address,
        ],
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    members = {(row["job"], row["pid"]) for row in json.loads(listed)["processes"] if row["worker_set"] == "policy"}
    assert members == {(job.job_id, pid) for job in (one, other) for pid in job.pids}

    one.process.kill()
    assert eventually(lambda: not agents_of(one))
    assert eventually(lambda: ray.available_resources().get("CPU") == free - len(other.pids))
    assert attach("policy").group_id == other.group_id
    with (
        RayVirtualCluster([int(free) - 2], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker, name_prefix="policy") as group,
    ):
        group.call("nothing").result()
    other.finish()
