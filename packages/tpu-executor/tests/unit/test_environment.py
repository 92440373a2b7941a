# SPDX-License-Identifier: Apache-2.0
"""The variables of each host, layer by layer."""

import sys

import pytest

from fairlead_placement import PortLease
from fairlead_tpu_executor import (
    CpuAcceleratorConfig,
    JaxUnavailableError,
    SliceInfo,
    SlicePool,
    TpuAcceleratorConfig,
    initialize_jax,
)
from fairlead_tpu_executor._environment import host_environment
from fairlead_tpu_executor._reservation import Lease

HOSTS = ("n0", "n1"), ("10.0.0.1", "10.0.0.2")
SLICES = [SliceInfo(name, 2, "10.0.0.1", 4, *HOSTS, "v4-16") for name in ("a", "b")]
MEGASCALE = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_PORT", "MEGASCALE_SLICE_ID")


def hold(count):
    """Return what a pool holds: slices, and a port for each."""
    ports = PortLease("10.0.0.1", 1400, "n", "id"), PortLease("10.0.0.3", 1500, "n", "id")
    return tuple(Lease(place, None, port) for place, port in zip(SLICES, ports, strict=True))[:count]


def environment(config, count, at=0, worker=0):
    return host_environment(config, hold(count), at, worker)


def test_one_slice():
    """With one slice no variable of several slices is set."""
    assert environment(TpuAcceleratorConfig("v4-16"), 1, worker=1) == {
        "EXECUTOR_CALL_INDEX": "1",
        "EXECUTOR_CALL_SLICE": "0",
        "EXECUTOR_NUM_HOSTS": "2",
        "EXECUTOR_COORDINATOR_ADDRESS": "10.0.0.1:1400",
        "EXECUTOR_JOB_COORDINATOR_ADDRESS": "10.0.0.1:1400",
        "EXECUTOR_PROCESS_COUNT": "2",
        "EXECUTOR_PROCESS_INDEX": "1",
        "TPU_HOST_ID": "1",
        "TPU_SLICE_NAME": "a",
        "TPU_NUM_DEVICES": "4",
        "TPU_VERSION": "v4-16",
        "TPU_POD_COUNT": "1",
    }


def test_many_slices():
    """The hosts of all slices are numbered in one sequence."""
    many = hold(1) * 100
    config = TpuAcceleratorConfig("v4-16", 100)
    found = [host_environment(config, many, at, worker) for at in range(100) for worker in range(2)]
    assert [one["EXECUTOR_PROCESS_INDEX"] for one in found] == [str(index) for index in range(200)]
    assert {one["EXECUTOR_PROCESS_COUNT"] for one in found} == {"200"}


def test_two_slices():
    """Each host has the coordinator of all slices and that of its own slice."""
    found = environment(TpuAcceleratorConfig("v4-16", 2, megascale_port=8081), 2, at=1)
    assert {name: found[name] for name in MEGASCALE} == {
        "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.1:8081",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_PORT": "8081",
        "MEGASCALE_SLICE_ID": "1",
    }
    assert (found["EXECUTOR_CALL_SLICE"], found["TPU_POD_COUNT"]) == ("1", "2")
    assert found["EXECUTOR_COORDINATOR_ADDRESS"] == "10.0.0.3:1500"


def test_one_cluster_over_all_slices():
    """All hosts of all slices have the coordinator of slice 0, the number of hosts, and an index in their order."""
    config = TpuAcceleratorConfig("v4-16", 2)
    found = [environment(config, 2, at, worker) for at in (0, 1) for worker in (0, 1)]
    assert [one["EXECUTOR_PROCESS_INDEX"] for one in found] == ["0", "1", "2", "3"]
    assert {one["EXECUTOR_PROCESS_COUNT"] for one in found} == {"4"}
    assert {one["EXECUTOR_JOB_COORDINATOR_ADDRESS"] for one in found} == {"10.0.0.1:1400"}


def test_addresses_of_ipv6():
    """An IPv6 address stands in brackets, which separates it from the port."""
    leases = (Lease(SLICES[0], None, PortLease("fd00::1", 1400, "n0", "id")), hold(2)[1])
    found = host_environment(TpuAcceleratorConfig("v4-16", 2, megascale_port=8081), leases, 0, 0)
    assert found["EXECUTOR_COORDINATOR_ADDRESS"] == "[fd00::1]:1400"
    assert (found["MEGASCALE_COORDINATOR_ADDRESS"], found["MEGASCALE_PORT"]) == ("[fd00::1]:8081", "8081")


def test_other_hosts():
    """Hosts without TPUs get no TPU variables."""
    found = environment(CpuAcceleratorConfig(1), 1)
    assert sorted(found) == [
        "EXECUTOR_CALL_INDEX",
        "EXECUTOR_CALL_SLICE",
        "EXECUTOR_COORDINATOR_ADDRESS",
        "EXECUTOR_JOB_COORDINATOR_ADDRESS",
        "EXECUTOR_NUM_HOSTS",
        "EXECUTOR_PROCESS_COUNT",
        "EXECUTOR_PROCESS_INDEX",
    ]


def test_megascale_port(monkeypatch):
    """The port is the configuration's, else COORD_PORT of the user's variables, else of the driver, else 8081."""
    config = TpuAcceleratorConfig("v4-16", 2)
    user = config.with_environment_variables(COORD_PORT="9001")
    monkeypatch.delenv("COORD_PORT", raising=False)
    assert environment(config, 2)["MEGASCALE_PORT"] == "8081"
    monkeypatch.setenv("COORD_PORT", "9000")
    assert environment(config, 2)["MEGASCALE_PORT"] == "9000"
    assert environment(user, 2)["MEGASCALE_PORT"] == "9001"
    assert environment(TpuAcceleratorConfig("v4-16", 2, megascale_port=9002), 2)["MEGASCALE_PORT"] == "9002"
    for wrong in ("x", "0", "65536", "-1"):
        monkeypatch.setenv("COORD_PORT", wrong)
        with pytest.raises(ValueError, match="COORD_PORT"):
            SlicePool(config).run(lambda: None)


def test_jax_outside_of_a_run(monkeypatch):
    """The error of `initialize_jax` names the missing variables, or says that jax is missing."""
    with pytest.raises(JaxUnavailableError, match="this process lacks EXECUTOR_JOB_COORDINATOR_ADDRESS"):
        initialize_jax()
    for name in ("EXECUTOR_JOB_COORDINATOR_ADDRESS", "EXECUTOR_PROCESS_COUNT", "EXECUTOR_PROCESS_INDEX"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setitem(sys.modules, "jax", None)  # as if it were not installed
    with pytest.raises(JaxUnavailableError, match=r'execution_env=\{"pip": \["jax"\]\}'):
        initialize_jax()
    with pytest.raises(ValueError, match="above 0"):
        initialize_jax(timeout_s=0)
