# SPDX-License-Identifier: Apache-2.0
"""How many functions of the package a call, a start and a change enter, on all threads of the driver."""

import contextlib
import sys
import threading
import time
from pathlib import Path

import pytest

import fairlead_workergroup
from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, current_worker

MOST_FUNCTIONS = 35
# View, plan, arguments, class, core, replies, call, results, and the seam to the clock and the connection.
MOST_FILES = 9
# Now and then a change looks whether it goes on, and moves its progress bar.
FILES_OF_A_CHANGE = 2
MOST_FUNCTIONS_OF = {"start": 150, "restart": 170, "resize": 180}
SOURCE = str(Path(fairlead_workergroup.__file__).parent)


class Worker:
    def __init__(self, gate):
        if current_worker().rank >= 8:  # a new worker is not there before the gate is open
            Path(f"{gate}.begun").touch()
            while not Path(gate).exists():
                time.sleep(0.01)

    def step(self, number):
        return number


@contextlib.contextmanager
def noting():
    """Yield the set of the functions of the package that this thread, and threads that start in the block, enter."""
    entered = set()

    def note(frame, event, _):
        code = frame.f_code
        # Comprehensions and generator expressions are parts of a function.
        if event == "call" and code.co_filename.startswith(SOURCE) and code.co_name[-5:] not in ("comp>", "expr>"):
            entered.add(code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield entered
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("changes", [False, True], ids=["at rest", "while a change waits"])
def test_few_functions_in_few_files(gate, eventually, changes):
    """A call of eight workers enters few functions in few files, also while a resize waits for a new worker."""
    with (
        RayVirtualCluster([9], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster,
            RayWorkerBuilder(Worker, str(gate)),
            [8],
            sharding_annotations=NamedSharding.from_shape(dp=8),
        ) as group,
        noting() as entered,
    ):
        resize = threading.Thread(target=group.resize, kwargs={"dp": 9})
        if changes:
            resize.start()
            assert eventually(Path(f"{gate}.begun").exists)
        for _ in range(3):
            group.call("step", 1).result()
        entered.clear()
        assert group.call("step", 1).result() == [1] * 8
        sys.setprofile(None)
        functions, files = len(entered), {code.co_filename for code in entered}
        gate.touch()
        if changes:
            resize.join()
    assert functions <= MOST_FUNCTIONS, sorted(code.co_qualname for code in entered)
    assert len(files) <= MOST_FILES + FILES_OF_A_CHANGE * changes, sorted(files)
