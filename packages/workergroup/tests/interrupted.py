# SPDX-License-Identifier: Apache-2.0
"""A driver that Ctrl-C interrupts: it changes groups until then, and reports what is left afterwards.

It prints each phase as it enters it. First it goes through all phases. Then each line of its input is the phase in
which it is interrupted.
"""

import json
import signal
import subprocess
import sys
import threading
import time

import ray
from processes import find_trees, note_marks
from ray.util.placement_group import placement_group_table

from fairlead_placement import RayVirtualCluster
from fairlead_placement._reserve import claims
from fairlead_placement._reserve.groups import are_shown
from fairlead_placement.testing import _snapshot
from fairlead_sharding import NamedSharding
from fairlead_workergroup import Elastic, RayWorkerGroup, Restart
from fairlead_workergroup.testing import kill

REPORT_S = 30.0
# Of the processes of all groups so far.
MARKS = []
# Threads that serve all groups of a process.
SERVING = ["fairlead-finalizers"]


class Worker:
    """A worker with a process of its own, whose hooks take a moment."""

    def __init__(self):
        subprocess.Popen(["sleep", "283"], start_new_session=True)

    def serve(self, seconds=0.01):
        time.sleep(seconds)

    def load(self):
        time.sleep(0.05)


class Interrupts:
    """Ctrl-C raises KeyboardInterrupt while a group is used, and counts."""

    def __init__(self):
        self.count, self.are_raised = 0, False
        signal.signal(signal.SIGINT, self._note)

    def _note(self, number, frame):
        self.count += 1
        if self.are_raised:
            raise KeyboardInterrupt


def call(group):
    for _ in range(20):
        group.call("serve").result()


def restart(group):
    kill(group, group.world_size - 1)
    group.call("serve", retries=1).result()


PHASES = {
    "call": call,
    "grow": lambda group: group.resize(dp=group.world_size + 1),
    "move": lambda group: group.restart([0], elsewhere=True),
    "restart": restart,
    "shrink": lambda group: group.resize(dp=group.world_size - 1),
    "shutdown": lambda group: group.shutdown("serve"),
}


# The workers of a group that is interrupted in these phases; in the others it has one.
WORKERS = dict.fromkeys(("start", "call", "shrink"), 2)


def enter(phase):
    sys.stdout.write(f"{phase}\n")
    sys.stdout.flush()


def use_group(cluster, phases, workers=2):
    enter("start")
    with RayWorkerGroup(
        cluster,
        Worker,
        sharding_annotations=NamedSharding.from_shape(dp=workers),
        workers_per_node=workers,
        restart=Restart(on_failure=True, method="load"),
        elastic=Elastic(on_resize="load"),
    ) as group:
        for phase in phases:
            enter(phase)
            PHASES[phase](group)
        enter("over")


def look():
    """Return what there is of the group, by kind."""
    found = {kind: list(lines) for kind, lines in _snapshot().items()}
    found["thread"] = [one.name for one in threading.enumerate() if one.name.startswith("fairlead-")]
    found["claim"] = [repr(one) for held in claims._held.values() for one in held]
    found["process"] = find_trees(MARKS)
    return found


def find_left(before):
    """Return what is there now and was not there before, by kind; another amount of a free resource is new."""
    new = {kind: [one for one in lines if one not in before[kind]] for kind, lines in look().items()}
    return {kind: lines for kind, lines in new.items() if lines}


def wait_for_the_end(before):
    """Wait until nothing is left; return what is left nevertheless."""
    deadline = time.monotonic() + REPORT_S
    while (left := find_left(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def interrupted(interrupts, cluster, phase):
    """Use a group until Ctrl-C, and return whether that was raised."""
    try:
        interrupts.are_raised = True
        try:
            use_group(cluster, [one for one in [phase] if one in PHASES], WORKERS.get(phase, 1))
        finally:
            interrupts.are_raised = False
    except KeyboardInterrupt:
        return True
    return False


def main(address):
    note_marks(MARKS)
    interrupts = Interrupts()
    ray.init(address=address, log_to_driver=False, logging_level="error")
    with RayVirtualCluster([4], use_gpus=False) as cluster:
        while not are_shown(placement_group_table().keys()):
            time.sleep(0.02)
        before = look()
        before["thread"] += SERVING
        use_group(cluster, list(PHASES))
        wait_for_the_end(before)
        enter("ready")
        for line in sys.stdin:
            phase = line.strip()
            interrupts.count = 0
            was_raised, error = True, ""
            try:
                was_raised = interrupted(interrupts, cluster, phase)
            except KeyboardInterrupt:  # the second one came where the first one was handled
                interrupts.are_raised = False
            except Exception as other:  # noqa: BLE001  the test shows it
                error = f"{type(other).__name__}: {other}"
            while not interrupts.count:
                time.sleep(0.01)
            enter(json.dumps({"raised": was_raised, "error": error, "left": wait_for_the_end(before)}))


if __name__ == "__main__":
    main(sys.argv[1])
