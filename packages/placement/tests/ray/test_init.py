# SPDX-License-Identifier: Apache-2.0
"""Attaching to a Ray that another process runs, or starting one."""

import shutil
import tempfile
from pathlib import Path

import pytest

# Explicit, because only some versions of Ray require a token on a local cluster.
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}


@pytest.fixture(scope="module")
def server(script_class):
    """Yield (address, log folder) of a Ray that another process starts with `init_ray` and ends."""
    # The path must be short, because Ray puts sockets below it.
    folder = tempfile.mkdtemp(prefix="fl-", dir="/tmp")
    script = script_class(
        f"""
        import ray
        from fairlead_placement import init_ray
        init_ray("{folder}/logs", address="local", num_cpus=2)
        print(ray.get_runtime_context().gcs_address)
        input()
        """,
        folder,
        {"CUDA_VISIBLE_DEVICES": "0", **TOKEN},
    )
    try:
        yield script.line(), Path(folder, "logs")
    finally:
        script.finish(check=False)
        shutil.rmtree(folder, ignore_errors=True)


def test_attaching(server, run_script):
    """RAY_ADDRESS is attached to. Nothing of this process's environment goes there, and `os.environ` is unchanged.

    A second call returns the same cluster and does not change Ray's log level; naming another cluster is refused.
    """
    address, _ = server
    secret = "FAIRLEAD_TEST_SECRET"
    out = run_script(
        f"""
        import logging, os, sys
        before = dict(os.environ)
        import ray
        from fairlead_placement import PlacementError, init_ray

        init_ray()
        print(ray.get_runtime_context().gcs_address)
        changed = {{name for name, _ in before.items() ^ os.environ.items()}}
        rays_own = {{"PYTHONBREAKPOINT"}}
        print([name for name in changed - rays_own if not name.startswith("RAY_")])

        @ray.remote(num_cpus=1)
        class Looker:
            def environment(self):
                return dict(os.environ), str(ray.get_runtime_context().runtime_env)

        looker = Looker.remote()
        environment, runtime_env = ray.get(looker.environment.remote())
        print("PATH" in environment, "{secret}" in environment, "{secret}" in runtime_env)
        rows = str(ray._private.state.actors()) + str(ray.get_runtime_context().runtime_env)
        print("Looker" in rows, "{secret}" in rows)

        logging.getLogger("ray").setLevel(logging.WARNING)
        init_ray(), init_ray(address="auto"), init_ray(address="{address}")
        logging.getLogger("fairlead_placement").addHandler(logging.StreamHandler(sys.stdout))
        init_ray(num_cpus=2), init_ray(num_cpus=3)
        print(ray.get_runtime_context().gcs_address, logging.getLogger("ray").level == logging.WARNING)
        for other in ("local", "10.0.0.1:6379"):
            try:
                init_ray(address=other)
            except PlacementError as error:
                print(error)
        """,
        RAY_ADDRESS=address,
        **TOKEN,
        FAIRLEAD_TEST_SECRET="hunter2",
    )

    assert out.splitlines() == [
        address,
        "[]",
        "True False False",
        "True False",
        (
            "init_ray(num_cpus=3) has no effect: it attached to a running Ray cluster, which has 2. Pass "
            'address="local" to start a cluster of this size.'
        ),
        f"{address} True",
        f"Ray is connected to {address} already. Call ray.shutdown() before 'local' is used.",
        f"Ray is connected to {address} already. Call ray.shutdown() before '10.0.0.1:6379' is used.",
    ]


def test_whose_local_ray(server, run_script):
    """A local Ray that was started for other visible devices is left alone; one for the same is attached to."""
    address, _ = server
    out = run_script(
        f"""
        import os, ray
        from fairlead_placement import _init, init_ray

        _init.find_cluster = lambda: "{address}"
        for devices in ("1", "0"):
            os.environ["CUDA_VISIBLE_DEVICES"] = devices
            init_ray(num_cpus=1)
            print(ray.get_runtime_context().gcs_address == "{address}")
            ray.shutdown()
        """,
        RAY_ADDRESS="",
        **TOKEN,
    )
    assert out.splitlines() == ["False", "True"]


def test_connection(server, run_script):
    """Each connection has its own text, also to the same cluster, with and without Ray's private mark."""
    address, _ = server
    out = run_script(
        """
        import ray
        from fairlead_placement import _init, init_ray
        from fairlead_placement.spi import connection

        mark, seen = _init.connection_mark, []
        for _init.connection_mark in (mark, lambda: None):
            for _ in range(2):
                init_ray()
                seen.append(connection())
                assert connection() == seen[-1]
                ray.shutdown()
                assert connection() == ""
        print(len(set(seen)), all(seen))
        """,
        RAY_ADDRESS=address,
        **TOKEN,
    )
    assert out.split() == ["4", "True"]


def test_a_file_that_outlived_its_cluster(run_script):
    """If something else listens at the address in Ray's file, `init_ray` fails in time and names the file.

    The script hides other heads of this machine from Ray, which would attach to the only one that it finds.
    """
    with tempfile.TemporaryDirectory(prefix="fl-", dir="/tmp") as folder:
        out = run_script(
            f"""
            import os, socket, time
            from pathlib import Path
            from ray._private import services
            from fairlead_placement import PlacementError, _init, init_ray

            services.find_gcs_addresses = lambda: set()
            _init.ATTACH_S = 2.0
            other = socket.create_server(("", 0))
            address = f"127.0.0.1:{{other.getsockname()[1]}}"
            file = Path("{folder}", "ray", "ray_current_cluster")
            file.parent.mkdir()
            file.write_text(address)
            began = time.monotonic()
            try:
                init_ray()
            except PlacementError as error:
                print(type(error).__name__, time.monotonic() - began < 10, error, flush=True)
            os._exit(0)  # Ray's own attempt goes on for about 40 s
            """,
            RAY_TMPDIR=folder,
            RAY_ADDRESS="",
        )
    assert out.startswith("HeadTimeoutError True Something listens at ")
    assert f"(from the file {folder}/ray/ray_current_cluster, which Ray writes when it starts; delete it if" in out


def test_log_dir(server):
    """A local Ray creates the given folder, and keeps its session and its logs there."""
    _, logs = server
    assert list(logs.glob("session_*/logs/raylet.out"))


def test_no_token(server, run_script, tmp_path):
    """The error of a cluster that requires a token says what to set."""
    address, _ = server
    out = run_script(
        f"""
        from fairlead_placement import PlacementError, init_ray
        try:
            init_ray(address="{address}")
        except PlacementError as error:
            print(error)
        """,
        RAY_AUTH_MODE="token",
        HOME=str(tmp_path),
    )
    assert f"The Ray cluster at {address} (given as address) wants a token and this process has none" in out
    assert 'or pass address="local" to start a cluster of your own' in out
    assert "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN" in out
