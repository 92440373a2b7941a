# SPDX-License-Identifier: Apache-2.0
"""A process that is connected through Ray Client: every package that cannot work there says so by name."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("grpc")

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
SERVER = """
import sys
import ray
from ray.util.client.server.server import serve

ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="error")
server = serve("127.0.0.1", int(sys.argv[1]))
print(f"ray://127.0.0.1:{sys.argv[1]}", flush=True)
input()
"""
DRIVER = """
import sys
import ray
from fairlead_placement import RayVirtualCluster
from fairlead_tpu_executor import CpuAcceleratorConfig, SlicePool
from fairlead_venvs import VenvSpec, create_local_venv_on_each_node
from fairlead_workergroup import RayWorkerGroup, attach

ray.init(sys.argv[1], logging_level="error")
cluster = RayVirtualCluster([1], use_gpus=False)
pool = SlicePool(CpuAcceleratorConfig())
for method in (
    lambda: RayWorkerGroup(cluster, dict),
    lambda: attach("name"),
    lambda: create_local_venv_on_each_node(VenvSpec(requirements=["idna"]), "name"),
    pool.reserve,
):
    try:
        print("not refused", method())
    except Exception as error:
        print(type(error).__name__, error)
pool.close()
"""


@pytest.fixture(scope="module")
def client_address(unused_port):
    """Yield the address of a server of Ray Client, whose Ray no other program may join."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(unused_port)],
        env={**os.environ, **TOKEN},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield server.stdout.readline().strip()
    finally:
        server.communicate(input="\n", timeout=120)


def test_refusals(client_address):
    """The first call of each package that needs the cluster names Ray Client and the remedy, and nothing is leaked."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, client_address],
        env={**os.environ, **TOKEN},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    refusal = (
        "This process is connected to Ray through Ray Client, which Fairlead does not support. Run the driver on a "
        "node of the cluster, with address='host:port' of the cluster's head, or submit it as a job with "
        "`ray job submit`."
    )
    classes = ["PlacementError", "PlacementError", "VenvError", "PlacementError"]
    assert done.stdout.splitlines() == [f"{name} {refusal}" for name in classes]
    assert "Worker ID" not in done.stderr
    assert "Traceback" not in done.stderr


def test_commands(client_address):
    """A command line refuses the address of a server of Ray Client in the same words."""
    for module, *arguments in (
        ("fairlead_inspect", "ps"),
        ("fairlead_tpu_executor", "status"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            env={**os.environ, **TOKEN, "RAY_ADDRESS": client_address},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 3, done.stderr
        assert done.stdout == ""
        assert done.stderr.startswith(
            f"{client_address!r} is an address of Ray Client, which Fairlead does not support."
        )
