# SPDX-License-Identifier: Apache-2.0
"""The variables of workers in real processes."""

import os
import subprocess
import sys
import textwrap

import ray

from fairlead_workergroup import RayWorkerGroup


class Reporter:
    """Tells its environment, as it was when the process started, and now."""

    def at_the_start(self):
        with open("/proc/self/environ") as file:
            return dict(line.split("=", 1) for line in file.read().split("\0") if line)

    def environment(self):
        return dict(os.environ)

    def path(self):
        return sys.path


def answers(group, method):
    return group.get_all_worker_results(group.run_all_workers_single_data(method))


class TestWorkers:
    def test_user_and_driver_variables(self, cluster, monkeypatch):
        """Workers get the user's variables and the listed ones of the driver; the user's mapping is not changed."""
        monkeypatch.setenv("NCCL_DEBUG", "from driver")
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "from driver")
        monkeypatch.setenv("UNNAMED", "from driver")
        given = {"NCCL_DEBUG": "from user", "MINE": "1", "PYTHONPATH": "/nowhere/at/all"}
        with RayWorkerGroup(cluster, Reporter, workers_per_node=1, env_vars=given) as group:
            (env,) = answers(group, "environment")
            (path,) = answers(group, "path")
        assert (env["NCCL_DEBUG"], env["GLOO_SOCKET_IFNAME"], env["MINE"]) == ("from user", "from driver", "1")
        assert "UNNAMED" not in env
        assert path.index("/nowhere/at/all") < path.index(os.path.dirname(os.__file__))
        assert given == {"NCCL_DEBUG": "from user", "MINE": "1", "PYTHONPATH": "/nowhere/at/all"}

    def test_no_runtime_env_unless_needed(self, cluster):
        """Workers without loader variables use prestarted processes; others have these variables from the start."""
        with RayWorkerGroup(cluster, Reporter, workers_per_node=1) as group:
            assert runtime_env(group) == {}
        variables = {"PYTHONHASHSEED": "7", "MALLOC_ARENA_MAX": "2", "LD_LIBRARY_PATH": "/nowhere"}
        with RayWorkerGroup(cluster, Reporter, workers_per_node=1, env_vars={**variables, "A": "1"}) as group:
            assert runtime_env(group) == {"env_vars": variables}
            (env,) = answers(group, "at_the_start")
            assert env.items() >= variables.items()


def runtime_env(group):
    return ray.get(group.workers[0].__ray_call__.remote(lambda _: dict(ray.get_runtime_context().runtime_env)))


DRIVER = """
import os, sys
import ray
from fairlead_placement import RayVirtualCluster, init_ray
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup

os.environ["FAIRLEAD_TEST_SECRET"] = "the-secret-value"


class Reporter:
    def environment(self):
        return "\\n".join(f"{name}={value}" for name, value in os.environ.items())


init_ray(address=sys.argv[1], num_cpus=4)
with RayVirtualCluster([1], use_gpus=False) as cluster:
    with RayWorkerGroup(cluster, RayWorkerBuilder(Reporter), env_vars={"SHOWN": "1"}) as group:
        environments = group.get_all_worker_results(group.run_all_workers_single_data("environment"))
        environments += [
            str(ray.get(worker.__ray_call__.remote(lambda _: ray.get_runtime_context().get_runtime_env_string())))
            for worker in group.workers
        ]
        table = repr(ray._private.state.actors())
        assert all("SHOWN=1" in environment for environment in environments[:1])
        print("actors:", table.count("ActorClassName"))
        print("in table:", "the-secret-value" in table or "FAIRLEAD_TEST_SECRET" in table)
        print("in runtime_env:", any("FAIRLEAD_TEST_SECRET" in environment for environment in environments[1:]))
        print("in workers:", any("FAIRLEAD_TEST_SECRET" in environment for environment in environments[:1]))
ray.shutdown()
"""


def drive(address: str, tmp_path) -> list[str]:
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    done = subprocess.run(
        [sys.executable, str(script), address], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()


class TestSecrets:
    """A variable that the driver did not name stays with the driver."""

    def test_cluster_of_another_process(self, local_ray, tmp_path):
        """The secret is in no worker's environment, no runtime_env, and no row of the actor table."""
        shown = drive(ray.get_runtime_context().gcs_address, tmp_path)
        assert shown[-3:] == ["in table: False", "in runtime_env: False", "in workers: False"]

    def test_embedded_cluster(self, tmp_path):
        """Workers of an embedded Ray inherit the driver's environment; Ray itself does not get the secret."""
        shown = drive("local", tmp_path)
        assert shown[-3:-1] == ["in table: False", "in runtime_env: False"]
        assert shown[-4] == "actors: 2"  # the worker and the node's agent
