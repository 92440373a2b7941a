# SPDX-License-Identifier: Apache-2.0
"""Tests of the command line over hosts, with a group that hangs."""

import ctypes
import json
import os
import textwrap
import time

import pytest

from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_workergroup import RayWorkerGroup, current_worker

from .hosts import Hosts

# How far the clocks of a host are ahead.
AHEAD_S = 5.0


@pytest.fixture(scope="module")
def shifted(namespaces, tmp_path_factory):
    """A folder that makes each Python with it in its PYTHONPATH run with clocks that are ahead."""
    folder = tmp_path_factory.mktemp("shifted")
    (folder / "sitecustomize.py").write_text(
        textwrap.dedent(f"""
            import time
            def shift(clock):
                return lambda: clock() + {AHEAD_S}
            time.time, time.monotonic = shift(time.time), shift(time.monotonic)
        """)
    )
    return str(folder)


class Trainer:
    """Waits for the others in `meet`, as in a collective; one rank never gets there."""

    def train(self, secret, late):
        if int(os.environ["RANK"]) == late:
            read, _ = os.pipe()
            ctypes.PyDLL(None).read(read, ctypes.create_string_buffer(1), 1)  # holds the GIL
        self.meet()

    def meet(self):
        with current_worker().waiting():
            time.sleep(600)


def hung_job():
    """A driver with a group over all hosts, of which rank 5 hangs."""
    with (
        RayVirtualCluster([4, 4], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster, Trainer, name_prefix="policy", sharding_annotations=NamedSharding.from_shape(dp=4, tp=2)
        ) as group,
    ):
        yield os.getpid()
        call = group.call("train", "secret-in-an-argument", 5)
        while any(one.method != "train" or one.since_progress_s < 1.1 for one in group.get_worker_status()):
            time.sleep(0.05)
        yield
        call.cancel(force=True)


def test_hung_over_hosts(namespaces, shifted, stop_process):
    """While the driver is stopped, `why` and `stacks` work over hosts whose clocks are seconds apart."""
    with Hosts() as hosts:
        hosts.start_host(num_cpus=0)
        for env in (None, {"PYTHONPATH": shifted}):
            hosts.start_host(num_cpus=4, env=env)
        with hosts.driver(hung_job) as driver:
            pid = driver.step()
            driver.step()
            with stop_process(pid):
                why = hosts.run("fairlead_inspect", "why", "--after", "1", "--timeout", "60", "--json")
                stacks = hosts.run("fairlead_inspect", "stacks", "--timeout", "60", "--json")
    for done, status in ((why, 1), (stacks, 0)):
        assert (done.returncode, done.stderr) == (status, "")
        assert "secret" not in done.stdout
    (job,) = json.loads(why.stdout)["jobs"]
    (late,) = [one for one in job["findings"] if one["blames"]]
    assert (late["kind"], late["worker_set"], late["ranks"]) == ("late", "policy", [5])
    (coords,) = [one["coords"] for alike in job["worker_sets"] for one in alike["members"] if one["rank"] == 5]
    assert coords == {"dp": 2, "tp": 1}
    assert "driver" in {one["kind"] for one in job["findings"]}
    ranks = [one["ranks"] for one in json.loads(stacks.stdout)["stacks"] if one["worker_set"] == "policy"]
    assert ranks == [["5"], ["0", "1", "2", "3", "4", "6", "7"]]
