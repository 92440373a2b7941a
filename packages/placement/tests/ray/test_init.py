# SPDX-License-Identifier: Apache-2.0
"""Attaching to a Ray that another process runs, or starting one."""

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

# Explicit, because only some versions of Ray require a token on a local cluster.
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}


@pytest.fixture(scope="module")
def folder():
    """The session folder of the scripts, so that they see no other cluster of this machine."""
    # The path must be short, because Ray puts sockets below it.
    with tempfile.TemporaryDirectory(prefix="fl-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def server(script_class, folder):
    """Yield (address, log folder) of a Ray that another process starts with `init_ray` and ends."""
    script = script_class(
        f"""
        import ray
        from fairlead_placement import init_ray
        init_ray("{folder}/logs", address="local", num_cpus=2)
        print(ray.get_runtime_context().gcs_address)
        input()
        """,
        folder,
        {"RAY_TMPDIR": str(folder), **TOKEN},
    )
    try:
        yield script.line(), Path(folder, "logs")
    finally:
        script.finish(check=False)


@pytest.fixture(scope="module")
def private(script_class, folder):
    """Yield (address, address for Ray Client) of the Ray that another program has started for itself.

    The second one is empty without grpcio, which a server of Ray Client needs.
    """
    script = script_class(
        """
        import importlib.util, socket, ray

        ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="error")
        client = ""
        if importlib.util.find_spec("grpc"):
            from ray.util.client.server.server import serve

            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            server = serve("127.0.0.1", port)
            client = f"ray://127.0.0.1:{port}"
        print(ray.get_runtime_context().gcs_address, client)
        input()
        """,
        folder,
        {"RAY_ADDRESS": "", "RAY_TMPDIR": str(folder), **TOKEN},
    )
    try:
        address, _, client = script.line().partition(" ")
        yield address, client
    finally:
        script.finish(check=False)


@pytest.mark.nightly  # Ray looks for a node for a minute
def test_no_node_here(server, in_container):
    """The error of a process that sees no node of the cluster says so, and what to do."""
    script = f"""
        from fairlead_placement import PlacementError, init_ray
        try:
            init_ray(address={server[0]!r})
        except PlacementError as error:
            print(error)
    """
    command, env = in_container(sys.executable, "-c", textwrap.dedent(script)), {**os.environ, **TOKEN}
    env["RAY_GCS_SERVER_REQUEST_TIMEOUT_SECONDS"] = "2"  # in which Ray looks for a node
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    expected = rf"Something answers at {server[0]}, .* If none of its nodes is on this machine, .* `ray job submit`"
    assert re.match(expected, done.stdout, re.DOTALL), done


def test_attaching(server, run_script):
    """RAY_ADDRESS is attached to. Nothing of this process's environment goes there, and `os.environ` is unchanged.

    A second call returns the same cluster and does not change Ray's log level; naming another cluster is refused.
    """
    address, _ = server
    secret = "FAIRLEAD_TEST_SECRET"
    out = run_script(
        f"""
        import logging, os
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
        f"{address} True",
        f"Ray is connected to {address} already. Call ray.shutdown() before 'local' is used.",
        f"Ray is connected to {address} already. Call ray.shutdown() before '10.0.0.1:6379' is used.",
    ]


def test_commands(server, private, folder, run_script):
    """Without an address, a command lists the clusters of this user on this machine if there are several."""
    script = """
        from fairlead_placement import PlacementError
        from fairlead_placement.extension import attach
        try:
            with attach("auto"):
                print("attached")
        except PlacementError as error:
            print(error)
        """
    with tempfile.TemporaryDirectory(prefix="fl-", dir="/tmp") as other:
        out = run_script(script, RAY_TMPDIR=other, RAY_ADDRESS="", **TOKEN)
    assert out.startswith('"auto" found no Ray cluster that is named or announced')
    assert {server[0], private[0]} <= set(re.findall(r"([\d.]+:\d+) \(process", out))


def test_announced(server, private, folder, run_script):
    """The cluster that `ray start` has announced comes before the local ones, and a user's token is found for it."""
    file = folder / "ray" / "ray_current_cluster"
    file.parent.mkdir(exist_ok=True)
    file.write_text(private[0])
    home = folder / "home" / ".ray"
    home.mkdir(parents=True)
    (home / "auth_token").write_text(TOKEN["RAY_AUTH_TOKEN"])
    try:
        out = run_script(
            """
            import os
            for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
                os.environ.pop(name, None)
            import ray
            from fairlead_placement import init_ray
            init_ray()
            print(ray.get_runtime_context().gcs_address, ray.cluster_resources()["CPU"])
            """,
            HOME=str(home.parent),
            RAY_TMPDIR=str(folder),
            RAY_ADDRESS="",
        )
    finally:
        file.unlink()
    assert out.split() == [private[0], "1.0"]


def test_ray_client(private, start_script):
    """A connection of Ray Client that somebody else has made is refused by the first method, and leaves no trace."""
    pytest.importorskip("grpc")
    script = start_script(
        f"""
        import gc
        import ray
        from fairlead_placement import PlacementError, RayVirtualCluster, init_ray
        from fairlead_placement.extension import connection, find_boards, publish, read_nodes, run_on_nodes

        ray.init("{private[1]}", logging_level="error")
        cluster = RayVirtualCluster([1], use_gpus=False)
        for method in (
            init_ray,
            read_nodes,
            find_boards,
            lambda: publish("key", 1, "value"),
            lambda: run_on_nodes(int, {{"a" * 56: ()}}, timeout_s=1.0),
            cluster.explain,
            cluster.reserve,
            cluster.slots,
            cluster.get_master_address_and_port,
        ):
            try:
                print("not refused", method())
            except PlacementError as error:
                print(error)
        print(repr(connection()), cluster, cluster.shutdown())
        del cluster, method
        gc.collect()
        """,
        **TOKEN,
    )
    out, errors = script.finish()
    *refusals, end = out.splitlines()
    assert end == "None RayVirtualCluster([1], CPU, name='', not reserved) True"
    (refusal,) = set(refusals)
    assert refusal == (
        "This process is connected to Ray through Ray Client, which Fairlead does not support. Run the driver on a "
        "node of the cluster, with address='host:port' of the cluster's head, or submit it as a job with "
        "`ray job submit`."
    )
    assert len(refusals) == 9
    assert "Worker ID" not in errors
    assert "Traceback" not in errors


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
    assert f"Something answers at {address}, which `address` names, but Ray cannot attach to it" in out
    assert 'address="local" starts a cluster of your own' in out
    assert "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN" in out
