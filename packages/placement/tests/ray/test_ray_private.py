# SPDX-License-Identifier: Apache-2.0
"""A running Ray that lacks the private parts that `_ray_private` wraps (seam: the attribute is removed)."""

import os
import re
import time

import pytest
import ray

from fairlead_placement.extension import list_raylets

pytestmark = pytest.mark.usefixtures("local_ray")


def test_nodes_here():
    """A node on this machine is found by its raylet, and none of which this process may not read the processes."""
    node = ray.nodes()[0]["NodeID"]

    def is_seen():
        return node in {raylet.node_id for raylet in list_raylets()}

    assert is_seen()
    starter = next(raylet.starter for raylet in list_raylets() if raylet.node_id == node)
    assert re.fullmatch(r"process \d+ `\S+`", starter)
    if os.geteuid() == 0 and (child := os.fork()) == 0:
        os.setgid(65534)
        os.setuid(65534)
        os._exit(is_seen())
    assert os.geteuid() or os.waitpid(child, 0)[1] == 0


# The first lines of a job whose environment changes everything that a process inherits.
JOB = """
    import os, time
    import ray
    from fairlead_placement._ray_private import create_actor, start_task

    def hook():
        os.environ["HOOKED"] = "yes"

    environment = {
        "env_vars": {"MINE": "yes", "PATH": "/nowhere:" + os.environ["PATH"]},
        "working_dir": os.getcwd(),
        "worker_process_setup_hook": hook,
    }
    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="error", runtime_env=environment)

    def look():
        return os.environ.get("MINE") or None, os.environ.get("HOOKED"), "/nowhere" in os.environ["PATH"]

    class Looker:
        def look(self):
            return look()

    def compare():
        actor = create_actor(ray.remote(Looker), (), num_cpus=0)
        return ray.get([actor.look.remote(), start_task(ray.remote(look), (), num_cpus=0, max_retries=0)])
"""


@pytest.mark.nightly
def test_the_environment_of_a_job(run_script):
    """Neither an actor nor a task gets the job's variables, hook and folder; a usual task does."""
    out = run_script(JOB + "    print(ray.get(ray.remote(look).remote()), *compare())")
    assert out == "('yes', 'yes', True) (None, None, False) (None, None, False)\n"


# How often a process is connected to Ray, and shuts it down while its threads use it: 200 times in `nox -s canary`.
ROUNDS = int(os.environ.get("FAIRLEAD_ROUNDS", "8"))


def test_shutdown_while_threads_wait(run_script):
    """A process survives `ray.shutdown()` while two of its threads send requests and wait for the answers.

    With Ray's own waits instead, it ends after some rounds (2.60): without a message, or by a segmentation fault.
    """

    @ray.remote(num_cpus=0, max_concurrency=16)
    class Sleeper:
        def sleep(self):
            time.sleep(0.002)

    sleeper = Sleeper.options(name="sleeper", namespace="rounds").remote()
    ray.get(sleeper.sleep.remote())
    out = run_script(
        f"""
        import threading
        import time

        import ray

        from fairlead_placement._ray_private import never_connect
        from fairlead_placement.extension import collect

        def work():
            never_connect()
            try:
                while True:
                    collect({{number: sleeper.sleep.remote for number in range(4)}}, 60.0)
                    answered.release()
            except ray.exceptions.RaySystemError:
                ended.append(True)

        ended, answered = [], threading.Semaphore(0)
        for number in range({ROUNDS}):
            ray.init(address="{ray.get_runtime_context().gcs_address}", namespace="rounds", logging_level="error")
            sleeper = ray.get_actor("sleeper")
            threads = [threading.Thread(target=work) for _ in range(2)]
            for thread in threads:
                thread.start()
            answered.acquire(timeout=60)
            time.sleep(number % 10 * 0.002)
            ray.shutdown()
            for thread in threads:
                thread.join(60)
        print(len(ended))
        """
    )
    assert out == f"{2 * ROUNDS}\n"
    ray.kill(sleeper)


def test_a_dropped_cluster_after_shutdown(run_script):
    """A real thread that returns a dropped cluster after `ray.shutdown()` neither joins nor starts a Ray.

    The next `ray.init` of the program succeeds, even if it overlaps with the thread, and the cluster loses nothing.
    """
    out = run_script(
        f"""
        import random
        import threading
        import time

        import ray

        real, elsewhere = ray._private.worker.init, []

        def init(*args, **options):
            if threading.current_thread() is not threading.main_thread():
                elsewhere.append(threading.current_thread().name)
            return real(*args, **options)

        ray.init = ray._private.worker.init = init

        from fairlead_placement import RayVirtualCluster

        address, joined = "{ray.get_runtime_context().gcs_address}", 0
        for number in range({ROUNDS}):
            ray.init(address=address, logging_level="error", log_to_driver=False)
            RayVirtualCluster([2], use_gpus=False).reserve()  # dropped
            time.sleep(random.random() * 0.05)
            ray.shutdown()
            if number % 2:  # otherwise the next `ray.init` overlaps with the return
                time.sleep(1.0)
                joined += ray.is_initialized()
        print(joined, elsewhere)
        """
    )
    assert out == "0 []\n"
