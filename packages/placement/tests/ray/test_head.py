# SPDX-License-Identifier: Apache-2.0
"""A Ray head (GCS) that does not answer: errors in time, and nothing left behind once it answers again."""

import contextlib
import functools
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import ray
from ray.util.placement_group import placement_group_table

from fairlead_placement import (
    HeadTimeoutError,
    PlacementError,
    PlacementTimeoutError,
    RayVirtualCluster,
    read_slots,
)
from fairlead_placement import _terminal as terminal
from fairlead_placement._nodes import head as _head
from fairlead_placement._reserve import held as _held
from fairlead_placement.extension import attach, create_groups, head_deadline, read_nodes, run_command
from fairlead_placement.testing import assert_no_leaks

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture
def stop_head(stop_process):
    """Stop the head during a `with` statement, in which requests get at least half a second."""
    process = ray._private.worker._global_node.all_processes["gcs_server"][0].process

    @contextlib.contextmanager
    def stop():
        with pytest.MonkeyPatch.context() as patch, stop_process(process.pid) as resume:
            patch.setattr(_head, "LEAST_S", 0.5)
            yield resume

    with assert_no_leaks(timeout_s=60):
        yield stop


@pytest.mark.nightly
def test_groups_that_are_created_too_late(stop_head, eventually):
    """A placement group that Ray creates after its reservation has failed is removed."""
    message = "a request to create placement groups"
    with stop_head(), pytest.raises(HeadTimeoutError, match=message), head_deadline(0.5):
        create_groups([{"name": "late", "bundles": [{"CPU": 1.0}]}], deadline=0.0)
    assert eventually(lambda: all(row["state"] == "REMOVED" for row in placement_group_table().values()))


# The limit of everything that has none of its own, and of everything that takes one.
LIMIT_S = 1.0
# How to use each public name of a cluster, and what comes of it; None for whatever needs no answer of the head.
USES = {
    "explain": (lambda cluster: cluster.explain(), HeadTimeoutError),
    "from_config": (lambda cluster: RayVirtualCluster.from_config({"gpus_per_node": 1, "num_nodes": 1}), None),
    "get_available_address_and_port": (lambda cluster: cluster.get_available_address_and_port(0, 0), None),
    "get_available_addresses_and_ports_batch": (
        lambda cluster: cluster.get_available_addresses_and_ports_batch([(0, 0)]),
        None,
    ),
    "get_master_address_and_port": (lambda cluster: cluster.get_master_address_and_port(), None),
    "get_placement_groups": (lambda cluster: cluster.get_placement_groups(), None),
    "get_resource_usage": (lambda cluster: cluster.get_resource_usage(), HeadTimeoutError),
    "grid": (lambda cluster: cluster.grid(), None),
    "groups": (lambda cluster: cluster.groups(), None),
    "max_colocated_worker_groups": (lambda cluster: cluster.max_colocated_worker_groups, None),
    "node_count": (lambda cluster: cluster.node_count(), None),
    "port_range": (lambda cluster: cluster.port_range, None),
    "print_all_worker_groups": (lambda cluster: cluster.print_all_worker_groups(), None),
    "print_cluster_grid": (lambda cluster: cluster.print_cluster_grid(), None),
    "replace_lost_nodes": (lambda cluster: cluster.replace_lost_nodes(LIMIT_S), HeadTimeoutError),
    "reserve": (
        lambda cluster: RayVirtualCluster([1], use_gpus=False, reserve_timeout_s=LIMIT_S).reserve(),
        HeadTimeoutError,
    ),
    "shutdown": (lambda cluster: cluster.shutdown(), HeadTimeoutError),
    "slots": (lambda cluster: cluster.slots(), None),
    "world_size": (lambda cluster: cluster.world_size(), None),
}
# These wait for each other, so that each has a cluster of its own.
CHANGES = ("replace_lost_nodes", "shutdown")


def look():
    """Look at the cluster as a command does."""
    with attach("auto"):
        read_nodes()
    return 0


def test_every_public_method(stop_head, call_in_time, eventually, monkeypatch, capsys):
    """Every public method of a cluster, and a command, returns or raises in time."""
    assert {name for name in dir(RayVirtualCluster) if not name.startswith("_")} == USES.keys()
    monkeypatch.setattr(terminal, "attach_to", lambda *_, **__: None)
    with contextlib.ExitStack() as made:
        shared, *own = (made.enter_context(RayVirtualCluster([1], use_gpus=False)) for _ in range(1 + len(CHANGES)))
        shared.get_master_address_and_port()  # which starts the agent
        clusters = {**dict.fromkeys(USES, shared), **dict(zip(CHANGES, own, strict=True))}
        calls = {name: functools.partial(USES[name][0], clusters[name]) for name in USES}
        calls["command"] = lambda: run_command(look)
        with monkeypatch.context() as patch:
            for module, name in ((_head, "ALIVE_S"), (_head, "HEAD_S"), (_held, "GIVE_BACK_S")):
                patch.setattr(module, name, LIMIT_S)
            exits = []
            patch.setattr(terminal, "os", SimpleNamespace(_exit=exits.append))
            with stop_head():
                outcomes = call_in_time(calls, LIMIT_S)
                assert capsys.readouterr().err.count("Ray's head (GCS) did not answer") == 1
                # Ray's own end would wait for the head, at the exit of the interpreter too.
                assert (outcomes.pop("command"), exits) == (3, [3])
            assert eventually(lambda: not _head.head_is_silent())
    wrong = {
        name: outcome for name, outcome in outcomes.items() if isinstance(outcome, BaseException) != bool(USES[name][1])
    }
    assert wrong == {}
    assert all(isinstance(outcomes[name], kind) for name, (_, kind) in USES.items() if kind)


@pytest.mark.nightly
def test_every_deadline_is_kept(stop_process, eventually):
    """Without any shorter limit of a test, everything ends within a second after its deadline.

    `shutdown` ends within its 30 s, also while another thread reserves the cluster.
    """
    process = ray._private.worker._global_node.all_processes["gcs_server"][0].process
    reserved = [RayVirtualCluster([1], use_gpus=False).reserve() for _ in range(3)]
    reserved[0].get_master_address_and_port()
    waiting = RayVirtualCluster([16], use_gpus=False, reserve_timeout_s=45.0)
    uses = {
        "reserve": (lambda: RayVirtualCluster([1], use_gpus=False, reserve_timeout_s=3.0).reserve(), 3.0),
        "reserve now": (lambda: RayVirtualCluster([1], use_gpus=False, reserve_timeout_s=0.0).reserve(), 0.0),
        "read_slots": (lambda: read_slots(reserved[1].get_placement_groups(), timeout_s=3.0), 3.0),
        "replace_lost_nodes": (lambda: reserved[2].replace_lost_nodes(3.0), 3.0),
        "explain": (reserved[1].explain, 30.0),
        "get_resource_usage": (reserved[1].get_resource_usage, 30.0),
        "shutdown": (reserved[0].shutdown, 30.0),
        "shutdown of what another thread reserves": (waiting.shutdown, 30.0),
    }
    took, outcomes = {}, {}

    def use(name):
        began = time.monotonic()
        try:
            outcomes[name] = uses[name][0]()
        except PlacementError as error:
            outcomes[name] = error
        took[name] = time.monotonic() - began

    with stop_process(process.pid), ThreadPoolExecutor(len(uses) + 1) as pool:
        reserving = pool.submit(waiting.reserve)
        time.sleep(0.5)
        for name in uses:
            pool.submit(use, name)
        assert eventually(lambda: len(took) == len(uses), 60), took
    assert isinstance(reserving.exception(60), PlacementError)
    assert all(isinstance(one, HeadTimeoutError | PlacementTimeoutError) for one in outcomes.values()), outcomes
    assert {name: seconds for name, seconds in took.items() if seconds > uses[name][1] + 1.0} == {}, took
    for cluster in reserved:
        assert cluster.shutdown()
    assert eventually(lambda: ray.available_resources().get("CPU") == 16, 60)
