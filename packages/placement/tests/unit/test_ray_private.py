# SPDX-License-Identifier: Apache-2.0
"""What private parts of Ray report (seam: their answers)."""

import os
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import ray
from ray.core.generated import autoscaler_pb2

from fairlead_placement.extension import autoscaler_is_there, collect, drain_deadlines, list_raylets


def test_drain_deadlines(monkeypatch):
    """Ray gives milliseconds, and 0 for a node without a deadline."""
    state = SimpleNamespace(get_draining_nodes=lambda: {"a": 1_500, "b": 0})
    monkeypatch.setattr(ray._private.state, "state", state)
    assert drain_deadlines() == {"a": 1.5, "b": float("inf")}


@pytest.mark.parametrize(
    ("version", "ids", "is_there"),
    [
        pytest.param(0, ["head"], False, id="no report"),
        pytest.param(7, ["", ""], False, id="without configuration"),
        pytest.param(7, ["head", ""], True, id="with configuration"),
    ],
)
def test_what_autoscalers_report(monkeypatch, version, ids, is_there):
    """Ray's autoscaler writes this, with and without a configuration."""
    status = autoscaler_pb2.GetClusterStatusReply()
    status.autoscaling_state.last_seen_cluster_resource_state_version = version
    for instance_id in ids:
        status.cluster_resource_state.node_states.add(instance_id=instance_id)
    client = SimpleNamespace(get_cluster_status=status.SerializeToString)
    monkeypatch.setattr(ray._private.worker, "global_worker", SimpleNamespace(gcs_client=client))
    assert autoscaler_is_there() is is_there


def test_collect_without_ray():
    """Without Ray no request is sent."""
    with pytest.raises(ray.exceptions.RaySystemError, match="Ray has been shut down"):
        collect({"a": lambda: pytest.fail("a request was sent")}, 1.0)


@pytest.mark.parametrize("space", ["--net", "--mount", "--pid"])
def test_raylets_of_other_namespaces(space, tmp_path):
    """A raylet whose network, files or pids are others than here is left out, although its process is seen."""
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("this process may not create namespaces")
    program = tmp_path / "raylet"
    program.symlink_to("/bin/sh")
    node_id = os.urandom(8).hex()  # the same test may run on this machine in another checkout
    command = [str(program), "-c", "echo runs; read line", "--gcs-address=192.0.2.1:6379", f"--node_id={node_id}"]
    apart = ["unshare", space, "--fork"] if space == "--pid" else ["unshare", space]

    def is_seen(*prefix):
        with subprocess.Popen([*prefix, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"runs\n"
            seen = node_id in {raylet.node_id for raylet in list_raylets()}
            process.stdin.close()
        return seen

    assert is_seen()
    assert not is_seen(*apart)


def test_raylets_under_other_pids(monkeypatch):
    """Where /proc is that of another namespace of pids, no process is known by its pid (seam: the own pid)."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr("psutil.process_iter", lambda: pytest.fail("processes were read"))
    assert list_raylets() == []
