# SPDX-License-Identifier: Apache-2.0
"""A Ray whose private parts have another shape is refused, with its version, before anything is read."""

import pickle

import pytest
import ray

from fairlead_inspect import _ray_private, look
from fairlead_placement import RayVersionError


def test_this_ray():
    """The installed version has the shape that this package reads."""
    _ray_private.check_ray()


def other_get(refs, *, timeout=None):
    """Wait for objects in a variable of another name."""


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("field", "gcs_pb2.TaskStateUpdate has no node_id, worker_pid, state_ts_ns"),
        ("number", "common_pb2.TaskStatus.RUNNING is 9, not 8"),
        ("table", "GlobalStateAccessor has no get_task_events"),
        ("function", "ray._private.worker.get has no variable object_refs"),
        ("no function", "ray._private.worker.get has no variable object_refs"),
        ("module", "gcs_pb2.JobTableData has no job_id, entrypoint"),
    ],
)
def test_another_shape(monkeypatch, part, message):
    """A look raises an error that names the version and the part, instead of reading something else."""
    found = _ray_private._find_generated
    replaced = {
        "field": ("gcs_pb2.TaskStateUpdate", found("gcs_pb2.TaskEvents")),
        "number": ("common_pb2.TaskStatus", {"FINISHED": 11, "FAILED": 12, "RUNNING": 9}),
        "module": ("gcs_pb2.JobTableData", None),
    }
    if part in replaced:
        path, other = replaced[part]
        monkeypatch.setattr(_ray_private, "_find_generated", lambda name: other if name == path else found(name))
    elif part == "table":
        others = ("get_job_table", "get_actor_table", "get_placement_group_table")
        tables = type("GlobalStateAccessor", (), dict.fromkeys(others))
        monkeypatch.setattr(ray._raylet, "GlobalStateAccessor", tables)
    else:
        monkeypatch.setattr(ray._private.worker, "get", other_get if part == "function" else None)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with pytest.raises(RayVersionError, match=r"fairlead-inspect cannot read .* gives no result") as error:
        look()
    assert message in str(error.value)
    assert f"Ray {ray.__version__}" in str(error.value)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
