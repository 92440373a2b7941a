# SPDX-License-Identifier: Apache-2.0
"""The chips and hosts of each type."""

import pytest
from ray._private.accelerators.tpu import VALID_TPU_TOPOLOGY
from ray.util.tpu import get_tpu_worker_resources

from fairlead_tpu_executor import TpuAcceleratorConfig


@pytest.mark.parametrize(
    ("name", "hosts", "chips_per_host"),
    [
        ("v2-8", 1, 4),
        ("v3-32", 4, 4),
        ("v4-8", 1, 4),
        ("v4-16", 2, 4),
        ("v4-32", 4, 4),
        ("v5p-128", 16, 4),
        ("v5litepod-1", 1, 1),
        ("v5litepod-4", 1, 4),
        ("v5litepod-8", 1, 8),
        ("v5litepod-16", 4, 4),
        ("v5e-16", 4, 4),
        ("v6e-8", 1, 8),
        ("v6e-16", 4, 4),
        ("v7x-16", 2, 4),
        ("tpu7x-16", 2, 4),
        ("TPU-V4-16", 2, 4),
    ],
)
def test_hosts(name, hosts, chips_per_host):
    """The number in a type counts cores or chips, and determines the hosts."""
    found = TpuAcceleratorConfig(name).slice_type
    assert (found.hosts, found.chips_per_host, found.chips) == (hosts, chips_per_host, hosts * chips_per_host)


def test_agreement_with_ray():
    """For every topology in Ray's table, hosts and chips match Ray's own helper."""
    for generation, topologies in VALID_TPU_TOPOLOGY.items():
        for topology in topologies:
            chips = eval(topology.replace("x", "*"))
            name = f"{generation}-{chips * (1 if generation in ('v5litepod', 'v6e') else 2)}"
            workers, each = get_tpu_worker_resources(topology, f"TPU-{generation.upper()}")
            found = TpuAcceleratorConfig(name, topology=topology).slice_type
            assert (found.hosts, found.chips_per_host) == (workers, each["TPU"]), (name, topology)


def test_two_small_machines():
    """A slice of 8 chips may be one host or two."""
    assert TpuAcceleratorConfig("v6e-8", topology="2x4", chips_per_vm=4).slice_type.hosts == 2
    assert TpuAcceleratorConfig("v6e-8", topology="2X4 ").slice_type.topology == "2x4"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("v9-8", {}, "the generations are v2, v3, v4"),
        ("v4", {}, "is not a TPU type"),
        ("a100", {}, "is not a TPU type"),
        ("v4-0", {}, "TensorCores"),
        ("v4-17", {}, "TensorCores"),
        ("v5litepod-0", {}, "counts chips"),
        ("v6e-12", {"chips_per_vm": 8}, "cannot share"),
        ("v6e-12", {"chips_per_vm": 3}, "a host has 1 or 2 or 4 or 8"),
        ("v4-16", {"chips_per_vm": True}, "a host has 1 or 2 or 4,"),
        ("v7x-16", {"chips_per_vm": 8}, "a host has 1 or 2 or 4,"),
        ("v4-16", {"topology": "2x2x4"}, "has 8 chips"),
        ("v4-16", {"topology": "2x"}, "not a topology"),
        ("v4-16", {"topology": "big"}, "not a topology"),
    ],
)
def test_refused(name, options, said):
    """A type that does not exist is a ValueError that lists what exists."""
    with pytest.raises(ValueError, match=said):
        TpuAcceleratorConfig(name, **options)


def test_not_a_name():
    """A type is a string."""
    with pytest.raises(TypeError, match="'v4-16'"):
        TpuAcceleratorConfig(16)


def test_other_spellings():
    """All spellings of a type have one canonical name."""
    names = ("TPU7x-16", "tpu-v7x-016", " v5e-8 ", "TPU-V4-16")
    assert [TpuAcceleratorConfig(name).kind for name in names] == ["v7x-16", "v7x-16", "v5litepod-8", "v4-16"]
