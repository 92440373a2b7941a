# SPDX-License-Identifier: Apache-2.0
"""Arguments are checked before Ray is asked."""

import pickle

import pytest
import ray

from fairlead_placement import PlacementError, PortLease, RayVirtualCluster, lease_ports, read_slots
from fairlead_placement._reserve import wait


def test_constructing_asks_nothing_of_ray(capsys):
    """Without a running Ray a cluster can be constructed, counted, drawn and shut down, but not reserved."""
    assert not ray.is_initialized()
    cluster = RayVirtualCluster([4, 0, 2], use_gpus=False, name="mine")

    assert (cluster.world_size(), cluster.node_count()) == (6, 2)
    assert repr(cluster) == "RayVirtualCluster([4, 0, 2], CPU, name='mine', not reserved)"
    cluster.print_cluster_grid()
    assert "Ray Cluster: 2 nodes, 6 CPUs" in capsys.readouterr().out
    assert cluster.shutdown() is True
    for use in (cluster.reserve, cluster.slots, cluster.get_placement_groups, cluster.get_master_address_and_port):
        with pytest.raises(PlacementError, match=r"Ray is not running in this process. Call init_ray\(\)"):
            use()
    assert not ray.is_initialized()


def test_from_config():
    """A config gives equal logical nodes; the options are those of the class."""
    cluster = RayVirtualCluster.from_config({"gpus_per_node": 4, "num_nodes": 3}, use_gpus=False, name="c")
    assert repr(cluster) == "RayVirtualCluster([4, 4, 4], CPU, name='c', not reserved)"
    ports = {"master_port_range_low": 2000, "master_port_range_high": 2010, "segment_size": 2}
    cluster = RayVirtualCluster.from_config({"gpus_per_node": 4, "num_nodes": 4, **ports}, port_range_high=2005)
    assert (cluster.port_range_low, cluster.port_range_high, cluster.segment_size) == (2000, 2005, 2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_nodes": 2}, r"config\['gpus_per_node'\] must be an integer of at least 1, got None"),
        ({"gpus_per_node": 8, "num_nodes": 0}, r"config\['num_nodes'\] must be .*, got 0"),
        ({"gpus_per_node": "8", "num_nodes": 1}, r"config\['gpus_per_node'\] must be .*, got '8'"),
        ({"gpus_per_node": 8, "num_nodes": 1, "gpus": 1}, r"unknown keys \['gpus'\]; it takes \['gpus_per_node', "),
    ],
)
def test_bad_config(config, message):
    """The error names the key that is missing or whose value is not a count."""
    with pytest.raises(ValueError, match=message):
        RayVirtualCluster.from_config(config)


@pytest.mark.parametrize(
    ("counts", "options", "message"),
    [
        ([], {}, r"a list with an entry per logical node, got \[\]"),
        (8, {}, "a list with an entry per logical node, got 8"),
        ("88", {}, "a list with an entry per logical node, got '88'"),
        ([4, -1], {}, r"integers, 0 or more, got -1 in \[4, -1\]"),
        ([4, 2.0], {}, r"integers, 0 or more, got 2.0 in \[4, 2.0\]"),
        ([True], {}, "integers, 0 or more, got True"),
        ([None], {}, "integers, 0 or more, got None"),
        ([1], {"placement_group_strategy": "PILE"}, "must be one of .*'STRICT_SPREAD'.*, got 'PILE'"),
        ([1], {"num_gpus_per_node": 0}, "num_gpus_per_node must be an integer of at least 1, got 0"),
        ([1], {"num_gpus_per_node": -1, "use_gpus": False}, "num_gpus_per_node must be .* at least 1, got -1"),
        ([1], {"max_colocated_worker_groups": 0}, "max_colocated_worker_groups must be .* at least 1, got 0"),
        ([1], {"max_colocated_worker_groups": 1.5}, "max_colocated_worker_groups must be .* at least 1, got 1.5"),
        ([1], {"reserve_timeout_s": -1}, "reserve_timeout_s must be .*0 or more and finite, got -1"),
        ([1], {"wait_for_nodes_s": float("nan")}, "wait_for_nodes_s must be .*, got nan"),
        ([1, 1, 1], {"segment_size": 2}, "3 logical nodes in use are not a multiple of segment_size=2"),
        ([1, 1], {"segment_size": 0}, "segment_size must be an integer of at least 1, got 0"),
        ([2], {"segment_size": 1, "placement_group_strategy": "PACK"}, "segment_size needs .*STRICT_PACK.*'PACK'"),
        ([1], {"label_selector": {"zone": "in(a,b)"}}, r"value that nodes must have, got 'zone': 'in\(a,b\)'"),
        ([1], {"label_selector": {"zone": None}}, "value that nodes must have, got 'zone': None"),
        ([1], {"port_range_low": 0}, "1 <= low <= high <= 65535, got low=0, high=1999"),
        ([1], {"port_range_low": 3000, "port_range_high": 2000}, "got low=3000, high=2000"),
        ([1], {"node_resource_constraints": []}, "has 0 entries for 1 logical nodes"),
        ([1], {"node_resource_constraints": [{"GPU": 1}]}, "other than CPU and GPU, got 'GPU': 1"),
        ([1], {"node_resource_constraints": [{"x": 0}]}, "positive, finite amounts .*, got 'x': 0"),
        ([1], {"communication_backend": "mpi"}, r"must be 'nccl', 'gloo' or None, got 'mpi'"),
        ([2], {"gpu_ids": [0]}, r"gpu_ids of logical node 0 must be 2 different ids, one for each bundle, got \[0\]"),
        ([2], {"gpu_ids": [0, "0"]}, r"gpu_ids of logical node 0 must be 2 different ids, .*, got \[0, '0'\]"),
        ([2], {"gpu_ids": [0, -1]}, r"gpu_ids must be numbers, 0 or more, or names .*, got -1 in \[0, -1\]"),
        ([1], {"gpu_ids": [True]}, "gpu_ids must be numbers, .*, got True"),
        ([1], {"gpu_ids": [""]}, "gpu_ids must be numbers, .*, got ''"),
        ([1], {"gpu_ids": "all"}, "gpu_ids must be a list of ids, .* or 'auto', got 'all'"),
        ([1, 1], {"gpu_ids": [0, 1]}, r"gpu_ids must be a list for each of the 2 logical nodes, got \[0, 1\]"),
        ([1, 1], {"gpu_ids": [[0], 1]}, "gpu_ids of logical node 1 must be 1 different ids, .*, got 1"),
        ([1, 0], {"gpu_ids": [[0], [1]]}, r"gpu_ids of logical node 1 must be 0 different ids, .*, got \[1\]"),
        (
            [1],
            {"gpu_ids": [0], "use_gpus": False},
            r"gpu_ids=\[0\] needs one GPU in each bundle \(use_gpus=True\), .*, got 0, ",
        ),
        ([1], {"gpu_ids": [0], "accelerators": {"GPU": 0.5}}, r"needs one GPU in each bundle .*, got 0.5, "),
        ([1], {"accelerators": {"CPU": 1}}, "has CPUs: give cpus_per_worker instead"),
        ([1], {"accelerators": {"GPU": 1}, "use_gpus": False}, r"has GPUs, and use_gpus=False none"),
        ([1], {"accelerators": {"TPU": 0}}, "accelerators must have positive, finite amounts, got 'TPU': 0"),
        ([1], {"accelerators": {"TPU": "1"}}, "accelerators must have positive, finite amounts, got 'TPU': '1'"),
        ([1], {"accelerators": {"TPU": True}}, "accelerators must have positive, finite amounts, got 'TPU': True"),
        ([1], {"accelerators": {"GPU": 1.5}}, r"each of 1 worker\(s\) 1.5 GPU, which must be a whole number"),
        ([1], {"accelerators": {"GPU": 3}, "max_colocated_worker_groups": 2}, r"each of 2 worker\(s\) 1.5 GPU"),
        ([1], {"cpus_per_worker": 0}, "cpus_per_worker must be an integer of at least 1, got 0"),
        ([1], {"gpu_ids": [0], "placement_group_strategy": "PACK"}, "needs .*='STRICT_PACK' .*, got 1, 'PACK'"),
    ],
)
def test_bad_arguments(counts, options, message):
    """A bad argument is refused at once, and the error shows its value."""
    with pytest.raises(ValueError, match=message):
        RayVirtualCluster(counts, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"low": 2000, "high": 1000}, "low=2000, high=1000"),
    ],
)
def test_bad_leases(options, message):
    """A bad range or count is refused before any port is requested."""
    with pytest.raises(ValueError, match=message):
        lease_ports([], **options)


def test_slots_for_no_group():
    """Slots that no group may share are refused before anything is asked of Ray."""
    with pytest.raises(ValueError, match="max_colocated_worker_groups must be an integer of at least 1, got 0"):
        read_slots([], 0)


@pytest.mark.parametrize(("address", "shown"), [("10.0.0.1", "10.0.0.1:1400"), ("fd00::1", "[fd00::1]:1400")])
def test_the_address_of_a_lease(address, shown):
    """An IPv6 address is in brackets before its port."""
    assert PortLease(address, 1400, "node", "id").host_port == shown


def test_colocation():
    """`enable_colocation` means at least two groups; a larger number takes precedence."""
    assert RayVirtualCluster([1]).max_colocated_worker_groups == 1
    assert RayVirtualCluster([1], enable_colocation=True).max_colocated_worker_groups == 2
    assert RayVirtualCluster([1], True, 3, enable_colocation=True).max_colocated_worker_groups == 3


def test_communication_backend():
    """The default backend is nccl with GPUs and gloo without."""
    assert RayVirtualCluster([1]).communication_backend == "nccl"
    assert RayVirtualCluster([1], use_gpus=False).communication_backend == "gloo"
    assert RayVirtualCluster([1], communication_backend="gloo").communication_backend == "gloo"
    assert RayVirtualCluster([1], use_gpus=False, communication_backend="nccl").communication_backend == "nccl"


@pytest.mark.parametrize(
    ("options", "bundle"),
    [
        ({}, {"CPU": 1.0, "GPU": 1.0}),
        ({"use_gpus": False}, {"CPU": 1.0}),
        ({"accelerators": {}}, {"CPU": 1.0}),
        ({"accelerators": {"GPU": 0.25}}, {"CPU": 1.0, "GPU": 0.25}),
        ({"accelerators": {"GPU": 0.3333}}, {"CPU": 1.0, "GPU": 0.3333}),
        ({"accelerators": {"neuron_cores": 2}, "use_gpus": False}, {"CPU": 1.0, "neuron_cores": 2.0}),
        ({"accelerators": {"HPU": 1}, "enable_colocation": True}, {"CPU": 2.0, "HPU": 1.0}),
        ({"cpus_per_worker": 4}, {"CPU": 4.0, "GPU": 1.0}),
        ({"cpus_per_worker": 4, "max_colocated_worker_groups": 2}, {"CPU": 8.0, "GPU": 1.0}),
    ],
)
def test_accelerators(options, bundle, monkeypatch):
    """A bundle holds the accelerators that are named, or one GPU (seams: Ray's answers)."""
    cluster = RayVirtualCluster([1], **options)
    monkeypatch.setattr(wait, "read_nodes", tuple)
    monkeypatch.setattr(wait, "read_holders", tuple)
    (ask,) = cluster.explain().asks
    assert ask.bundle == bundle
    assert cluster.use_gpus is ("GPU" in bundle)
    assert cluster.communication_backend == ("nccl" if "GPU" in bundle else "gloo")


def test_a_cluster_is_not_sent():
    """A cluster belongs to its driver. The error of pickling it says what to send instead."""
    with pytest.raises(TypeError, match=r"belongs to its driver; send its slots\(\) instead"):
        pickle.dumps(RayVirtualCluster([1]))


@pytest.mark.parametrize("options", [{"placement_group_strategy": "PACK"}, {"segment_size": 2}])
def test_clusters_whose_nodes_are_not_replaced(options):
    """If Ray chooses the nodes, or they belong together, the error says what to do, before anything is requested."""
    with pytest.raises(PlacementError, match=r"cannot be replaced, .* Call shutdown\(\), and reserve it again"):
        RayVirtualCluster([1, 1], **options).replace_lost_nodes()
