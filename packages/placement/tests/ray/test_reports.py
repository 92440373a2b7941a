# SPDX-License-Identifier: Apache-2.0
"""Groups of a cluster, reports on a reservation, and placement groups of others."""

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from fairlead_placement import PlacementError, PlacementTimeoutError, RayVirtualCluster, read_slots
from fairlead_placement.extension import claim_slots

pytestmark = pytest.mark.usefixtures("local_ray")


class Group:
    """A `group` of a library; all of them are equal, and none can be hashed."""

    __hash__ = None

    def __eq__(self, other):
        return isinstance(other, Group)


def test_groups_of_a_cluster():
    """Groups are listed in the order of their slots until they release these or are dropped."""
    with RayVirtualCluster([3], use_gpus=False, max_colocated_worker_groups=3) as cluster:
        assert cluster.groups() == ()
        slots = cluster.slots()
        groups = [Group(), Group(), Group()]
        last = claim_slots(slots[2:], "on the last slot", group=groups[0])
        claims = [claim_slots(slots[:1], "first", group=groups[1]), claim_slots(slots, "on all", group=groups[2])]
        claims.append(claim_slots(slots[:1], "without a group"))

        def numbers():
            return [[group is listed for group in groups].index(True) for listed in cluster.groups()]

        assert numbers() == [1, 2, 0]
        claims.pop(0).release()
        assert numbers() == [2, 0]
        groups[2] = None  # dropped without a release
        assert numbers() == [0]
        for claim in (last, *claims):
            claim.release()
    assert cluster.groups() == ()


class TestExplain:
    def test_fits(self):
        """The report shows where the cluster would be placed, and reserves nothing."""
        cluster = RayVirtualCluster([2, 3], use_gpus=False)
        report = cluster.explain()
        (node,) = report.nodes
        assert (report.verdict, report.plan) == ("fits", {0: (node.node_id,) * 2, 1: (node.node_id,) * 3})
        assert node.node_id[:8] in str(report)
        assert "It fits now." in str(report)
        assert repr(cluster).endswith("not reserved)")

    def test_taken(self, eventually):
        """The report names holders: groups by name, actors by name or class, and tasks as the rest."""
        holder = ray.remote(num_cpus=3)(Holder)
        actors = [holder.options(name="trainer").remote(), holder.remote()]
        ray.get([actor.ping.remote() for actor in actors])
        with RayVirtualCluster([4], use_gpus=False, name="first"):
            # Until the node reports the holders, their resources look free.
            assert eventually(lambda: ray.available_resources()["CPU"] == 6)
            report = RayVirtualCluster([8], use_gpus=False).explain()
            assert report.verdict == "taken"
            assert sorted((h.kind, h.name.split("-")[0]) for h in report.holders) == [
                ("actor", "Holder"),
                ("actor", "trainer"),
                ("placement group", "first"),
            ]
            words = " ".join(str(report).replace("│", " ").split())
            assert "actor trainer" in words
            assert f"(job {ray.get_runtime_context().get_job_id()}): 1 x 3 CPU" in words
            assert "4 x 1 CPU" in words
        for actor in actors:
            ray.kill(actor)
        assert eventually(lambda: ray.available_resources()["CPU"] == 16)

    def test_impossible(self):
        """A request that does not fit idle nodes is impossible, also a unified group with too few physical nodes."""
        assert RayVirtualCluster([17], use_gpus=False).explain().verdict == "impossible"
        assert RayVirtualCluster([1, 1], use_gpus=False).explain(unified=True).verdict == "impossible"


class Holder:
    def ping(self):
        return None


def test_groups_of_others():
    """The bundles of placement groups that others have made are slots in physical order."""
    groups = [placement_group([{"CPU": 1}] * count) for count in (2, 1)]
    slots = read_slots(groups)
    assert [(slot.node_idx, slot.placement_group.id) for slot in slots] == [
        (0, groups[0].id),
        (0, groups[0].id),
        (1, groups[1].id),
    ]
    assert [slot.worker_resources for slot in slots] == [{"CPU": 1.0}] * 3
    remove_placement_group(groups[0])
    with pytest.raises(PlacementError, match="has been removed"):
        read_slots(groups)
    pending = placement_group([{"CPU": 99}], name="large")
    with pytest.raises(PlacementTimeoutError, match="large: PENDING"):
        read_slots([pending], timeout_s=0.2)
    for group in (pending, groups[1]):
        remove_placement_group(group)
