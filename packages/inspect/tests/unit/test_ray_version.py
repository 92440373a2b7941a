# SPDX-License-Identifier: Apache-2.0
"""The private parts of the installed Ray are as this package reads them; of another Ray, it gives no result."""

import inspect

import pytest
import ray
from ray.core.generated import common_pb2, gcs_pb2

from fairlead_inspect import _ray_private, look
from fairlead_placement import PlacementError

TABLES = ("get_job_table", "get_actor_table", "get_task_events", "get_placement_group_table")
FIELDS = {
    gcs_pb2.JobTableData: "job_id entrypoint driver_pid driver_address is_dead config",
    gcs_pb2.ActorTableData: "actor_id class_name job_id state name ray_namespace node_id address pid owner_address "
    "start_time timestamp end_time death_cause required_resources serialized_runtime_env function_descriptor",
    gcs_pb2.TaskEvents: "task_id attempt_number task_info state_updates",
    common_pb2.TaskInfoEntry: "type name actor_id parent_task_id required_resources runtime_env_info",
    gcs_pb2.TaskStateUpdate: "node_id worker_pid state_ts_ns",
    gcs_pb2.PlacementGroupTableData: "placement_group_id creator_job_id creator_actor_id name state stats bundles "
    "placement_group_creation_timestamp_ms",
}


def test_tables():
    """The tables of Ray's head have the fields and the numbers of states that are read."""
    assert [name for name in TABLES if not hasattr(ray._raylet.GlobalStateAccessor, name)] == []
    for message, fields in FIELDS.items():
        assert [one for one in fields.split() if one not in message.DESCRIPTOR.fields_by_name] == []
    numbers = (_ray_private.FINISHED, _ray_private.FAILED, _ray_private.RUNNING)
    assert tuple(map(common_pb2.TaskStatus.Value, ("FINISHED", "FAILED", "RUNNING"))) == numbers


@pytest.mark.parametrize(("name", "variable"), [("get", "object_refs"), ("wait", "ray_waitables")])
def test_variables_with_objects(name, variable):
    """The functions that wait have the objects in variables of these names, from which `why` reads them."""
    assert variable in inspect.unwrap(getattr(ray._private.worker, name)).__code__.co_varnames
    assert "object_refs" in ray._private.worker.Worker.get_objects.__code__.co_varnames


def test_another_shape(monkeypatch):
    """A look raises an error that names the version and the part, instead of reading something else."""

    class Table:
        def get_job_table(self):
            return [gcs_pb2.JobTableData().SerializeToString()]

    monkeypatch.setattr(gcs_pb2, "JobTableData", common_pb2.TaskInfoEntry)
    monkeypatch.setattr(ray._private.state.state, "_connect_and_get_accessor", Table)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    message = rf"fairlead-inspect cannot read the jobs of Ray {ray.__version__}: .* It gives no result"
    with pytest.raises(PlacementError, match=message):
        look()
