# SPDX-License-Identifier: Apache-2.0
"""The variables of each host, layer by layer."""

import os
import socket
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fairlead_placement import PortLease, PortUnavailableError
from fairlead_tpu_executor import (
    CpuAcceleratorConfig,
    JaxUnavailableError,
    SliceInfo,
    TpuAcceleratorConfig,
    initialize_jax,
    testing,
)
from fairlead_tpu_executor import _leases as leases
from fairlead_tpu_executor._environment import host_environment
from fairlead_tpu_executor._leases import Lease, megascale_port

HOSTS = ("n0", "n1"), ("10.0.0.1", "10.0.0.2")
SLICES = [SliceInfo(name, 2, "10.0.0.1", 4, *HOSTS, "v4-16") for name in ("a", "b")]
MEGASCALE = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_PORT", "MEGASCALE_SLICE_ID")


def hold(count, megascale=None):
    """Return what a pool holds: slices, a port for each, and the port of the coordinator of all of them."""
    of_all = None if megascale is None else PortLease(*megascale, "n", "id")
    first = Lease(SLICES[0], None, PortLease("10.0.0.1", 1400, "n", "id"), of_all)
    return (first, Lease(SLICES[1], None, PortLease("10.0.0.3", 1500, "n", "id")))[:count]


def environment(config, count, at=0, worker=0, megascale=None):
    return host_environment(config, hold(count, megascale), at, worker)


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
    found = environment(TpuAcceleratorConfig("v4-16", 2), 2, at=1, megascale=("10.0.0.1", 8081))
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
    found = [environment(config, 2, at, worker, megascale=("m", 1)) for at in (0, 1) for worker in (0, 1)]
    assert [one["EXECUTOR_PROCESS_INDEX"] for one in found] == ["0", "1", "2", "3"]
    assert {one["EXECUTOR_PROCESS_COUNT"] for one in found} == {"4"}
    assert {one["EXECUTOR_JOB_COORDINATOR_ADDRESS"] for one in found} == {"10.0.0.1:1400"}


def test_addresses_of_ipv6():
    """An IPv6 address stands in brackets, which separates it from the port."""
    own, megascale = (PortLease("fd00::1", port, "n0", "id") for port in (1400, 8081))
    found = host_environment(TpuAcceleratorConfig("v4-16", 2), (Lease(SLICES[0], None, own, megascale),), 0, 0)
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


def test_megascale_port():
    """The port is the configuration's, else COORD_PORT of the user's variables, else of the driver, else 8081."""
    config = TpuAcceleratorConfig("v4-16", 2)
    user = config.with_environment_variables(COORD_PORT="9001")
    assert megascale_port(config, {}) == 8081
    assert megascale_port(config, {"COORD_PORT": "9000"}) == 9000
    assert megascale_port(user, {"COORD_PORT": "9000"}) == 9001
    assert megascale_port(TpuAcceleratorConfig("v4-16", 2, megascale_port=9002), {"COORD_PORT": "9000"}) == 9002
    for wrong in ("x", "0", "65536", "-1"):
        with pytest.raises(ValueError, match="COORD_PORT"):
            megascale_port(config, {"COORD_PORT": wrong})


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


def test_variables_of_a_pretend_host(monkeypatch):
    """The variables of a host are set for its start only; those that others set meanwhile stay."""
    monkeypatch.setenv("TPU_NAME", "before")
    monkeypatch.delenv("TPU_WORKER_ID", raising=False)
    monkeypatch.delenv("SET_MEANWHILE", raising=False)
    with testing.set_variables({"TPU_NAME": "slice", "TPU_WORKER_ID": "1"}):
        assert (os.environ["TPU_NAME"], os.environ["TPU_WORKER_ID"]) == ("slice", "1")
        os.environ["SET_MEANWHILE"] = "kept"
    assert os.environ["TPU_NAME"] == "before"
    assert "TPU_WORKER_ID" not in os.environ
    assert os.environ.pop("SET_MEANWHILE") == "kept"


def test_a_port_that_is_not_free(monkeypatch):
    """A port on which no process listens may be free within a minute, and is tried again; the error says who has it."""
    lease = Lease(replace(SLICES[0], node_ips=("127.0.0.1", "127.0.0.1"), ip_address="127.0.0.1"), None, None)
    answers, slept, opened = [], [], []

    def lease_ports(slots, *, low, high):
        if not (answer := answers.pop()):
            raise PortUnavailableError("127.0.0.1", 1, low, high, 0, 1)
        return ((answer,),)

    monkeypatch.setattr(leases, "lease_ports", lease_ports)
    monkeypatch.setattr(leases, "time", SimpleNamespace(monotonic=lambda: float(len(slept)), sleep=slept.append))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        answers[:] = [None]
        with pytest.raises(PortUnavailableError) as caught:
            leases.lease_megascale(lease, port, lambda: opened.append(1))
        assert f"needs port {port} on 127.0.0.1. Find its user" in caught.value.__notes__[-1]
        assert slept == []
    answers[:] = ["lease", None, None]
    assert leases.lease_megascale(lease, port, lambda: opened.append(1)) == "lease"
    assert (len(slept), len(opened)) == (2, 4)
    answers[:] = [None] * 100
    with pytest.raises(PortUnavailableError) as caught:
        leases.lease_megascale(lease, port, lambda: None)
    assert "Find its user there" in caught.value.__notes__[-1]
