# SPDX-License-Identifier: Apache-2.0
"""A link between two groups under random faults: no call ever sees a wrong element, or two versions."""

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_transfer import Link, LocalTensor, StaleWeightsError, TransferError
from fairlead_workergroup import (
    Elastic,
    RayWorkerGroup,
    ResizeTimeoutError,
    Restart,
    WorkerFailureError,
    WorkerStartError,
    current_worker,
)

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.nightly]

SEED = int(os.environ.get("FAIRLEAD_SOAK_SEED", "0"))
SETTINGS = [
    {},
    {"transport": "object_store"},
    {"check_replicas": "always"},
]
SECONDS = float(os.environ.get("FAIRLEAD_SOAK_S", "20"))
# How long a machine that is busy may take until something of each kind has happened.
MOST_S = SECONDS + 180
ROWS = 1 << 16
EXPECTED = (
    ResizeTimeoutError,
    StaleWeightsError,
    TransferError,
    WorkerFailureError,
    WorkerStartError,
)


class Rows:
    """Holds its rows of one tensor, and all of another one."""

    def __init__(self):
        self.build()

    def build(self):
        me = current_worker()
        self.first, end = (rank * ROWS // me.world_size for rank in (me.rank, me.rank + 1))
        self.rows, self.whole = np.zeros((end - self.first, 4), np.float32), np.zeros(64, np.int64)

    def fill(self, value):
        self.rows[:] = self.whole[:] = value

    def weights(self):
        return {"rows": LocalTensor(self.rows, (ROWS, 4), (self.first, 0)), "whole": self.whole}

    def values(self):
        return sorted({*np.unique(self.rows).tolist(), *np.unique(self.whole).tolist()})

    def pid(self):
        return os.getpid()


def make_group(cluster, name, workers):
    return RayWorkerGroup(
        cluster,
        Rows,
        name_prefix=name,
        workers_per_node=workers,
        sharding_annotations=NamedSharding.from_shape(dp=workers),
        restart=Restart(max_restarts=100_000),
        elastic=Elastic(on_resize="build"),
    )


@pytest.mark.timeout(MOST_S + 240)
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_changing_groups(options):
    """Workers are killed, stopped and restarted, and groups are resized, while weights are sent and looked at."""
    counts, over, began = Counter(), threading.Event(), time.monotonic()
    with (
        RayVirtualCluster([3], use_gpus=False) as some,
        RayVirtualCluster([4], use_gpus=False) as others,
        make_group(some, "policy", 2) as policy,
        make_group(others, "generation", 3) as generation,
        Link(policy, generation, source="weights", target="weights", **options) as link,
        ThreadPoolExecutor(2) as threads,
    ):
        link.guard("values")

        def inject_faults():
            rng = random.Random(SEED + 1)
            while not over.wait(rng.uniform(0.3, 2.0)):
                with contextlib.suppress(ProcessLookupError, *EXPECTED):
                    pid = rng.choice(rng.choice([policy, generation]).call("pid").result(timeout=60))
                    kills = rng.random() < 0.5
                    os.kill(pid, signal.SIGKILL if kills else signal.SIGSTOP)
                    counts["killed" if kills else "stopped"] += 1
                    if not kills:
                        over.wait(rng.uniform(0.2, 2.0))
                        os.kill(pid, signal.SIGCONT)

        def look():
            while not over.wait(0.01):
                with contextlib.suppress(*EXPECTED):
                    seen = generation.call("values").result(timeout=60)
                    assert len({tuple(values) for values in seen}) == 1, seen
                    assert len(seen[0]) == 1, seen
                    counts["looked"] += 1

        def change(version):
            group, sizes = rng.choice([(policy, (1, 2, 3)), (generation, (2, 3, 4))])
            match rng.choices(["send", "sync", "restart", "resize"], [20, 1, 2, 1])[0]:
                case "send":
                    policy.call("fill", version).result(timeout=60)
                    link.send(version, timeout=60)
                    counts["sent"] += 1
                case "sync":
                    link.sync(timeout=60)
                case "restart":
                    group.restart_failed_workers()
                case "resize":
                    group.resize(dp=rng.choice(sizes), timeout=60)
                    counts["resized"] += 1

        rng, version = random.Random(SEED), 0
        work = [threads.submit(inject_faults), threads.submit(look)]
        try:
            while time.monotonic() < began + SECONDS or not all(counts[one] for one in ("sent", "looked", "killed")):
                assert time.monotonic() < began + MOST_S, counts
                version += 1
                try:
                    change(version)
                except EXPECTED as error:
                    counts[type(error).__name__] += 1
                    for group in (policy, generation):
                        with contextlib.suppress(*EXPECTED):
                            group.restart_failed_workers()
        finally:
            over.set()
        for one in work:
            one.result(120)
        for last in range(version + 1, version + 6):
            with contextlib.suppress(*EXPECTED):  # Ray notices the last kill a moment later
                for group in (policy, generation):
                    group.restart_failed_workers()
                policy.call("fill", last).result(timeout=60)
                link.send(last, timeout=120)
                break
        assert generation.call("values").result(timeout=60) == [[last]] * generation.world_size
        assert set(link.versions().values()) == {last}
    print(f"\n{options}:", *(f"{number:6} {what}" for what, number in counts.items()), sep="\n  ")  # noqa: T201
