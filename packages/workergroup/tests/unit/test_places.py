# SPDX-License-Identifier: Apache-2.0
"""The slot of each rank: pure, on slots that no Ray has created."""

import dataclasses

import pytest

from fairlead_placement import Slot
from fairlead_workergroup._start.layout import lay_out


@dataclasses.dataclass(frozen=True)
class Group:
    """What the layout looks at of a placement group: who it is."""

    id: str


def slots(*counts: int, unified: bool = False, physical: tuple[str, ...] | None = None) -> list[Slot]:
    """Slots of logical nodes with so many bundles, each on a physical node of its own unless named."""
    made: list[Slot] = []
    for node_idx, count in enumerate(counts):
        node_id = physical[node_idx] if physical else f"node{node_idx}"
        for bundle in range(count):
            made.append(
                Slot(
                    placement_group=Group("all" if unified else f"group{node_idx}"),
                    bundle_index=len(made) if unified else bundle,
                    node_idx=node_idx,
                    node_id=node_id,
                    node_ip=f"10.0.0.{node_idx}",
                    node_rank=node_idx,
                    local_rank=bundle,
                )
            )
    return made


def where(places) -> list[tuple[int, int]]:
    return [(place.slot.node_idx, place.slot.bundle_index) for place in places]


class TestOnePerSlot:
    def test_order_and_names(self):
        """Ranks follow the slots; the name says node and bundle."""
        places = lay_out(slots(2, 1), prefix="p")
        assert where(places) == [(0, 0), (0, 1), (1, 0)]
        assert [place.name for place in places] == ["p-0-0", "p-0-1", "p-1-0"]
        assert [place.rank for place in places] == [0, 1, 2]
        assert [place.tied_group for place in places] == [0, 1, 2]
        assert places[2].tied_bundles == (1, [0])

    def test_node_ranks_count_physical_nodes(self):
        """NODE_RANK, LOCAL_RANK and LOCAL_WORLD_SIZE count physical nodes, which logical nodes may share."""
        places = lay_out(slots(2, 1, 1, physical=("a", "b", "a")), prefix="p")
        assert [(p.node_rank, p.local_rank, p.local_world_size) for p in places] == [
            (0, 0, 3),
            (0, 1, 3),
            (1, 0, 1),
            (0, 2, 3),
        ]

    @pytest.mark.parametrize(
        ("wanted", "expected"),
        [
            (1, [(0, 0), (1, 0), (3, 0)]),
            (2, None),
            ([2, 0, 1], [(0, 0), (0, 1), (3, 0)]),
            ((3, 1, 2), [(0, 0), (0, 1), (0, 2), (1, 0), (3, 0), (3, 1)]),
        ],
    )
    def test_workers_per_node(self, wanted, expected):
        """The first slots of each logical node in use are chosen, as many as requested."""
        there = slots(3, 1, 0, 2)
        if expected is None:
            with pytest.raises(ValueError, match="asks for 2 workers on logical node 1, which has 1 slots"):
                lay_out(there, prefix="p", workers_per_node=wanted)
        else:
            assert where(lay_out(there, prefix="p", workers_per_node=wanted)) == expected

    @pytest.mark.parametrize(
        ("wanted", "error", "message"),
        [
            ([1], ValueError, r"has 1 entries \[1\], but 2 logical nodes are in use: \[0, 1\]"),
            ([0, 0], ValueError, "leaves no worker"),
            (-1, ValueError, "asks for -1 workers"),
            (True, TypeError, "must be an int or a list of ints"),
            ("2", TypeError, "must be an int or a list of ints"),
            ([1, 1.5], TypeError, "must be an int or a list of ints"),
        ],
    )
    def test_bad_workers_per_node(self, wanted, error, message):
        """The error has the request."""
        with pytest.raises(error, match=message):
            lay_out(slots(2, 2), prefix="p", workers_per_node=wanted)

    def test_no_slots(self):
        """A group needs at least one slot."""
        with pytest.raises(ValueError, match="at least one slot"):
            lay_out([], prefix="p")


class TestTiedGroups:
    def test_order_and_names(self):
        """Ranks follow the list; workers of a tied group of several are named by it."""
        places = lay_out(slots(4, 4), prefix="p", bundle_indices_list=[(1, [2, 3]), (0, [0, 1]), (0, [3])])
        assert where(places) == [(1, 2), (1, 3), (0, 0), (0, 1), (0, 3)]
        assert [place.name for place in places] == ["p-grp0-0", "p-grp0-1", "p-grp1-0", "p-grp1-1", "p-0-3"]
        assert [(place.tied_group, place.tied_rank) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
        assert places[1].tied_bundles == (1, [2, 3])

    def test_unified(self):
        """In one placement group over all nodes a tied group may span nodes."""
        places = lay_out(slots(2, 2, unified=True), prefix="p", bundle_indices_list=[(0, [0, 2]), (0, [1, 3])])
        assert [place.slot.node_id for place in places] == ["node0", "node1", "node0", "node1"]

    @pytest.mark.parametrize(
        ("groups", "error", "message"),
        [
            ([], ValueError, "bundle_indices_list is empty"),
            ([(0, [])], ValueError, r"bundle_indices_list\[0\] names no bundle of logical node 0"),
            ([(5, [0])], ValueError, r"names logical node 5; in use are \[0, 1\]"),
            ([(0, [0, 7])], ValueError, r"names bundle 7 of logical node 0, which has \[0, 1\]"),
            ([(0, [0]), (0, [1, 0])], ValueError, "bundle 0 of logical node 0 is in tied groups 0 and 1"),
            ([0], TypeError, r"\(node_idx, \[bundle indices\]\) pairs, got 0"),
            ([(0, 1)], TypeError, "pairs"),
        ],
    )
    def test_bad_lists(self, groups, error, message):
        """The error has the available bundles."""
        with pytest.raises(error, match=message):
            lay_out(slots(2, 2), prefix="p", bundle_indices_list=groups)

    @pytest.mark.parametrize("options", [{"workers_per_node": 1}, {"bundle_indices_list": [(0, [0])]}])
    def test_slots_of_several_clusters(self, options):
        """Numbers that occur in two clusters do not identify a slot."""
        there = [*slots(2), *(dataclasses.replace(slot, placement_group=Group("other")) for slot in slots(2))]
        assert where(lay_out(there, prefix="p")) == [(0, 0), (0, 1)] * 2
        with pytest.raises(ValueError, match="2 slots are bundle 0 of logical node 0"):
            lay_out(there, prefix="p", **options)

    def test_exclusive(self):
        """It cannot be combined with workers_per_node."""
        with pytest.raises(ValueError, match="not both"):
            lay_out(slots(2), prefix="p", workers_per_node=1, bundle_indices_list=[(0, [0])])
