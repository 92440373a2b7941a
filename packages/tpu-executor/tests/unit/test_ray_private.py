# SPDX-License-Identifier: Apache-2.0
"""The fallbacks for parts of Ray that are not public: each test removes the part."""

import sys
from types import SimpleNamespace

import pytest
import ray
from ray._private.accelerators import TPUAcceleratorManager
from ray.actor import ActorClass

from fairlead_tpu_executor import SlicePool
from fairlead_tpu_executor._ray_private import (
    no_announcement,
    process_is_fresh,
    topology_is_valid,
    unwrap_remote,
    usual_topology,
)


def function():
    """Do nothing."""


def test_topologies(monkeypatch):
    """Without Ray's table every topology is valid."""
    assert topology_is_valid("v4", "2x2x2")
    assert not topology_is_valid("v4", "2x4")
    monkeypatch.delattr(TPUAcceleratorManager, "is_valid_tpu_accelerator_topology")
    assert topology_is_valid("v4", "2x4")


def test_usual_topologies(monkeypatch):
    """The most compact topology of Ray's table is the usual one; without the table there is none."""
    assert [usual_topology("v4", 32), usual_topology("v6e", 16), usual_topology("v4", 7)] == ["2x4x4", "4x4", ""]
    monkeypatch.setitem(sys.modules, "ray._private.accelerators.tpu", None)
    assert usual_topology("v4", 32) == ""


def test_announcements(monkeypatch):
    """The functions of Ray that announce a cluster are restored, and one that is missing is left out."""
    monkeypatch.delattr(ray._common.utils, "reset_ray_address")
    write = ray._private.utils.write_ray_address
    with no_announcement():
        assert ray._private.utils.write_ray_address is not write
        assert not hasattr(ray._common.utils, "reset_ray_address")
    assert ray._private.utils.write_ray_address is write
    assert not hasattr(ray._common.utils, "reset_ray_address")


def test_counters_of_functions(monkeypatch):
    """Without Ray's counters no process counts as fresh."""
    manager = SimpleNamespace(_num_task_executions={"this task": 1})
    monkeypatch.setattr(ray._private.worker.global_worker, "function_actor_manager", manager)
    assert process_is_fresh()
    manager._num_task_executions["another task"] = 1
    assert not process_is_fresh()
    del manager._num_task_executions
    assert not process_is_fresh()


def test_functions_under_ray_remote(monkeypatch):
    """Without the function under `@ray.remote` it is refused, and the message says what to pass instead."""
    remote = ray.remote(num_cpus=2)(function)
    plain, options = unwrap_remote(remote)
    assert (plain, options["num_cpus"]) == (function, 2)
    assert unwrap_remote(function) == (function, {})
    monkeypatch.delattr(remote, "_function")
    with pytest.raises(TypeError, match="Pass the plain function or class"):
        SlicePool("v4-16").run(remote)


def test_classes_under_ray_remote(monkeypatch):
    """The same for classes."""

    class Plain:
        pass

    remote = ray.remote(max_concurrency=2)(Plain)
    plain, options = unwrap_remote(remote)
    assert issubclass(plain, Plain)
    assert options["max_concurrency"] == 2
    monkeypatch.delattr(ActorClass, "_default_options", raising=False)
    monkeypatch.delattr(remote, "_default_options", raising=False)
    with pytest.raises(TypeError, match="Pass the plain function or class"):
        unwrap_remote(remote)
