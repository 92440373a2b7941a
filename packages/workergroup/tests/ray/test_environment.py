# SPDX-License-Identifier: Apache-2.0
"""The variables of workers in real processes."""

import os
import sys

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


class TestWorkers:
    def test_user_and_driver_variables(self, cluster, monkeypatch):
        """Workers get the user's variables and the listed ones of the driver; the user's mapping is not changed.

        A variable that the driver did not name stays with the driver: it is in no table of Ray either.
        """
        monkeypatch.setenv("NCCL_DEBUG", "from driver")
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "from driver")
        monkeypatch.setenv("UNNAMED", "the-secret-value")
        given = {"NCCL_DEBUG": "from user", "MINE": "1", "PYTHONPATH": "/nowhere/at/all"}
        with RayWorkerGroup(cluster, Reporter, workers_per_node=1, env_vars=given) as group:
            (env,) = group.call("environment").result()
            (path,) = group.call("path").result()
            shown = str(runtime_env(group)), repr(ray._private.state.actors())
        assert (env["NCCL_DEBUG"], env["GLOO_SOCKET_IFNAME"], env["MINE"]) == ("from user", "from driver", "1")
        assert "UNNAMED" not in env
        assert not any("UNNAMED" in text or "the-secret-value" in text for text in shown)
        assert path.index("/nowhere/at/all") < path.index(os.path.dirname(os.__file__))
        assert given == {"NCCL_DEBUG": "from user", "MINE": "1", "PYTHONPATH": "/nowhere/at/all"}

    def test_no_runtime_env_unless_needed(self, cluster):
        """Workers without loader variables use prestarted processes; others have these variables from the start."""
        with RayWorkerGroup(cluster, Reporter, workers_per_node=1) as group:
            assert runtime_env(group) == {}
        variables = {"PYTHONHASHSEED": "7", "MALLOC_ARENA_MAX": "2", "LD_LIBRARY_PATH": "/nowhere"}
        with RayWorkerGroup(cluster, Reporter, workers_per_node=1, env_vars={**variables, "A": "1"}) as group:
            assert runtime_env(group) == {"env_vars": variables}
            (env,) = group.call("at_the_start").result()
            assert env.items() >= variables.items()


def runtime_env(group):
    return ray.get(group.workers[0].__ray_call__.remote(lambda _: dict(ray.get_runtime_context().runtime_env)))
