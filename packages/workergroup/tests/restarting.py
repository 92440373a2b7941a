# SPDX-License-Identifier: Apache-2.0
"""A worker class and helpers for the tests that lose workers and restart them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fairlead_sharding import NamedSharding
from fairlead_workergroup import WorkerFailureError, current_worker

AXES = NamedSharding.from_shape(dp=2)
GRID = NamedSharding.from_shape(dp=2, tp=2)
VALUE = np.ones(20_000)


class Worker:
    """A worker that knows its arguments and its incarnation, and that can die in several ways."""

    def __init__(self, value=None, fail_again=()):
        worker = current_worker()
        if worker.incarnation and worker.rank in fail_again:
            raise OSError("cannot start a second time")
        self.value = value
        self.loaded = None

    def load(self):
        self.loaded = current_worker().incarnation

    def slowly_load(self):
        time.sleep(0.8)

    def load_when_open(self):
        """Wait until the file `GATE` exists; tell with another file that this has begun."""
        Path(f"{os.environ['GATE']}.{current_worker().rank}").touch()
        while not os.path.exists(os.environ["GATE"]):
            time.sleep(0.02)

    def fail_to_load(self):
        raise OSError("no checkpoint")

    def note(self, value):
        self.noted = [*getattr(self, "noted", []), value]

    def get_notes(self):
        return self.noted

    def raise_nothing(self):
        pass

    def state_of(self, item):
        return self.state()

    def state(self):
        worker = current_worker()
        return worker.rank, worker.incarnation, self.loaded, float(np.sum(self.value)), os.environ["MASTER_PORT"]

    def pid(self):
        return os.getpid()

    def double(self, data, die_at=(), until=1):
        worker = current_worker()
        if worker.rank in die_at and worker.incarnation < until:
            os._exit(1)
        return data * 2

    def die(self, ranks):
        if current_worker().rank in ranks:
            os._exit(1)

    def count(self, n, die_at=()):
        for i in range(n):
            if i == 1 and current_worker().rank in die_at and not current_worker().incarnation:
                os._exit(1)
            yield i

    def die_once(self, pair):
        item, path = pair
        if item == 5 and not path.exists():
            path.touch()
            os._exit(1)
        return item

    def fail_with(self, rank, pid):
        if current_worker().rank == rank:
            os._exit(1)
        if current_worker().rank == 0:
            while "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:  # until it has ended
                pass
            raise ConnectionError("my peer has gone")
        time.sleep(20)

    def raise_error(self):
        raise ValueError("mine")

    def raise_loss(self):
        raise WorkerFailureError((), "of a group of mine")

    def sum_slowly(self, block):
        """Keep all pages of a large value resident for several measurements of the guard."""
        total = int(block.sum())
        time.sleep(1.0)
        return total

    def start_child(self, size):
        code = f"block = b'x' * {size}; import time; time.sleep(60)"
        subprocess.run([sys.executable, "-c", code], check=True)

    def grow(self, size):
        self.block = np.ones(size // 8)
        time.sleep(30)


def is_restarting(group):
    return any(worker["state"] == "restarting" for worker in group.worker_metadata)


def die(group, *ranks):
    """End workers from inside, and wait until a call reports their loss."""
    call = group.call("die", ranks)
    assert call.wait(timeout=60)
    with pytest.raises(WorkerFailureError) as caught:
        call.result()
    assert [failure.rank for failure in caught.value.failures] == list(ranks)
