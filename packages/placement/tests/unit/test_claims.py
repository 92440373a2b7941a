# SPDX-License-Identifier: Apache-2.0
"""Worker groups are counted per slot: one too many is refused instead of waiting forever."""

import pytest
from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup

from fairlead_placement import ResourceInsufficientError, Slot
from fairlead_placement.extension import claim_slots


def slots_of(count, capacity=1):
    group = PlacementGroup(PlacementGroupID.from_random())
    return [
        Slot(
            placement_group=group,
            bundle_index=at,
            node_idx=0,
            node_id="n",
            node_ip="10.0.0.1",
            node_rank=0,
            local_rank=at,
            capacity=capacity,
        )
        for at in range(count)
    ]


def test_a_second_group_is_refused():
    """The error names the group that is in the slot and what to change; no slot is claimed."""
    slots = slots_of(3)
    first = claim_slots(slots[1:2], "policy")
    with pytest.raises(ResourceInsufficientError) as caught:
        claim_slots(slots, "critic")
    assert str(caught.value) == (
        "'critic' cannot run in bundle 1 of logical node 0: the bundle has room for 1 worker group, and 'policy' is "
        "there. Shut 'policy' down, or reserve the cluster with enable_colocation=True. "
        "A group that the program dropped ends soon: try again."
    )
    assert caught.value.__context__ is None  # which would print it twice
    claim_slots([slots[0], slots[2]], "others").release()
    first.release()


def test_capacity():
    """A slot takes as many groups as the cluster was reserved for. The error names them and the missing option."""
    slots = slots_of(1, capacity=2)
    claims = [claim_slots(slots, "one"), claim_slots(slots, "two")]
    with pytest.raises(ResourceInsufficientError) as caught:
        claim_slots(slots, "three")
    assert str(caught.value) == (
        "'three' cannot run in bundle 0 of logical node 0: the bundle has room for 2 worker groups, and 'one', 'two' "
        "are there. Shut one of them down, or reserve the cluster with max_colocated_worker_groups=3. "
        "A group that the program dropped ends soon: try again."
    )
    claims[0].release()
    claims.append(claim_slots(slots, "three"))
    for claim in claims:
        claim.release()


def test_release():
    """A released slot can be claimed again; a second release does not free a slot that another group has claimed."""
    slots = slots_of(2)
    first = claim_slots(slots, "first")
    first.release()
    second = claim_slots(slots, "second")
    first.release()
    with pytest.raises(ResourceInsufficientError, match="'second' is there"):
        claim_slots(slots, "third")
    second.release()
