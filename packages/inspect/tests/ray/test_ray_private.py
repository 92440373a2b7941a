# SPDX-License-Identifier: Apache-2.0
"""What this package uses of Ray that is not public, against the Ray that is installed."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import ray
from ray.util import placement_group, remove_placement_group

from fairlead_inspect import _ray_private
from fairlead_inspect._node.references import SAMPLE, calibrate
from fairlead_inspect._verdict.waits import is_promise

NEVER = "fairlead-test-never"


@ray.remote(num_cpus=0)
class Sleeper:
    def ready(self):
        return True

    def sleep(self, seconds):
        time.sleep(seconds)


@pytest.fixture
def job(local_ray):
    return ray.get_runtime_context().get_job_id()


# Of libraries: a file of Ray, and what the rules rely on there. Most cannot be imported without pandas and others.
SOURCES = {
    "train/v2/_internal/execution/worker_group/thread_runner.py": ["class ThreadRunner", "target=_run_target"],
    "train/v2/_internal/execution/worker_group/worker.py": ["class RayTrainWorker"],
    "train/v2/_internal/execution/context.py": ["def _sync_checkpoint_dir_name_across_ranks"],
    "train/v2/_internal/execution/collective_impl.py": ["def barrier", "def broadcast_from_rank_zero"],
    "train/v2/_internal/execution/controller/controller.py": ["class TrainController"],
    "air/_internal/util.py": ["class RunnerThread(threading.Thread)", "def run(self)"],
    "tune/trainable/function_trainable.py": ["class ImplicitFunc", "RunnerThread("],
    "data/_internal/execution/util.py": ["class _SingleThreadedWrapper", "ThreadPoolExecutor(max_workers=1)"],
    "data/_internal/execution/operators/actor_pool_map_operator.py": ["class _MapWorker"],
    "serve/_private/replica.py": ["class ReplicaActor"],
    "serve/_private/controller.py": ["class ServeController"],
    "rllib/env/single_agent_env_runner.py": ["class SingleAgentEnvRunner"],
    "util/multiprocessing/pool.py": ["class PoolActor"],
    "util/queue.py": ["class _QueueActor"],
    "dag/compiled_dag_node.py": ["def do_exec_tasks"],
    "experimental/channel/shared_memory_channel.py": ["def read"],
}


@pytest.mark.parametrize("file", SOURCES)
def test_libraries(file):
    """The threads and classes by which the rules recognise code of the job are where they were."""
    text = (Path(ray.__file__).parent / file).read_text(encoding="utf-8")
    assert [one for one in SOURCES[file] if one not in text] == []


# Attaches as a command does, and stays until its input ends.
COMMAND = """
    import sys
    import ray
    from fairlead_placement.extension import attach

    with attach(sys.argv[1]):
        print("job", ray.get_runtime_context().get_job_id(), file=sys.__stdout__, flush=True)
        sys.stdin.read()
"""


def test_commands_are_no_jobs(job):
    """A command that looks at the same time is no job for another one, unless its id is given."""
    command = [sys.executable, "-c", textwrap.dedent(COMMAND), ray.get_runtime_context().gcs_address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            its_id = next(line for line in other.stdout if line.startswith("job ")).split()[1]
            assert job in [found.job_id for found in _ray_private.read_jobs()]
            assert its_id not in [found.job_id for found in _ray_private.read_jobs()]
            assert [found.job_id for found in _ray_private.read_jobs(its_id)] == [its_id]
        finally:
            other.stdin.close()


def test_tables(job, eventually):
    """The tables of jobs, actors and calls, read by the accessor."""
    one, pending = Sleeper.remote(), Sleeper.options(resources={NEVER: 1}).remote()
    ray.get(one.ready.remote())
    calls = [one.sleep.remote(60), pending.ready.remote()]
    (mine,) = [found for found in _ray_private.read_jobs() if found.job_id == job]
    assert mine.worker_id == job.ljust(56, "f")
    assert mine.node_id == ray.get_runtime_context().get_node_id()
    actors = {found.actor_id: found for found in _ray_private.read_actors(job)}
    assert (actors[one._actor_id.hex()].class_name, actors[one._actor_id.hex()].state) == ("Sleeper", "ALIVE")
    assert actors[pending._actor_id.hex()].state == "PENDING_CREATION"
    assert actors[pending._actor_id.hex()].resources == {NEVER: 1.0}
    assert actors[one._actor_id.hex()].owner == mine.worker_id

    def running():
        found, finished, created = _ray_private.read_calls(job)
        states = {call.task_id: call.state for call in found}
        return states.get(calls[0].task_id().hex()) == "RUNNING" and finished and one._actor_id.hex() in created

    assert eventually(running, 60)
    spans = {found.name.rpartition(".")[2]: found for found in _ray_private.read_spans(job)}
    assert {"__init__", "ready", "sleep"} <= spans.keys()
    assert {found.actor_id for found in spans.values()} == {one._actor_id.hex()}
    assert spans["ready"].began < spans["ready"].ended < spans["sleep"].began < time.time()
    assert (spans["sleep"].ended, spans["sleep"].state, spans["sleep"].pid > 0) == (None, "RUNNING", True)
    assert spans["sleep"].node_id == mine.node_id
    for actor in (one, pending):
        ray.kill(actor)
    assert eventually(lambda: any(found.death for found in _ray_private.read_actors(job)), 60)
    dead = next(found for found in _ray_private.read_actors(job) if found.death)
    assert dead.death.intended
    assert abs(dead.death.at - time.time()) < 120


def test_placement_groups(job):
    """The placement groups that are not placed, read by the accessor; without an autoscaler no node is on the way."""
    placed = placement_group([{"CPU": 1}])
    assert placed.wait(60)
    held = placement_group([{"CPU": 1, NEVER: 1}] * 2, name="never")
    ready = held.ready()
    assert is_promise(ready.hex())
    assert not is_promise(Sleeper.remote().ready.remote().hex())
    (found,) = _ray_private.read_reservations()
    expected = (held.id.hex(), job, "never", "", "2 x 1 CPU, 1 fairlead-test-never")
    assert (found.group_id, found.job_id, found.name, found.creator, found.bundles) == expected
    assert found.reason == "INFEASIBLE"
    assert abs(found.requested - time.time()) < 120
    assert _ray_private.read_launches() == 0
    for group in (placed, held):
        remove_placement_group(group)


def test_offset(local_ray):
    """The id of an object is found in the memory of its reference."""
    reference = ray.put(1)
    assert calibrate(reference) == calibrate(ray.ObjectRef(SAMPLE)) > 0
    assert calibrate(object.__new__(type("Other", (), {"binary": lambda self: b"\xff" * len(SAMPLE)}))) == -1
