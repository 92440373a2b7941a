# SPDX-License-Identifier: Apache-2.0
"""The slots of placement groups that others have made, without Ray (seams: its tables, its wait and the clock)."""

from types import SimpleNamespace

import pytest
from ray import PlacementGroupID

from fairlead_placement import PlacementTimeoutError, read_slots
from fairlead_placement._reserve import groups, slots

ROW = {"state": "CREATED", "bundles": {0: {"CPU": 1.0}, 1: {"CPU": 1.0, "GPU": 1.0}}, "bundles_to_node_id": {}}


class Group:
    """A handle that has come from elsewhere: it would ask Ray's head for its bundles, without a deadline."""

    id = PlacementGroupID.from_random()


@pytest.fixture
def group(monkeypatch):
    """A group that is placed on a node."""
    row = {**ROW, "bundles_to_node_id": dict.fromkeys(ROW["bundles"], "node")}
    monkeypatch.setattr(groups, "placement_group_table", lambda _: row)
    monkeypatch.setattr(groups, "alive_nodes", lambda: frozenset({"node"}))
    return Group()


def test_bundles_without_a_request(group):
    """The table that says where a group is also has its bundles."""
    (placed,) = groups.read_placed([group], deadline=0.0)
    assert (placed.node_idx, placed.node_ids) == ((0, 0), ("node", "node"))
    assert [dict(bundle) for bundle in placed.bundles] == [{"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}]


def test_accelerators_in_use(group, monkeypatch):
    """Accelerators that others use are waited for until the deadline, not for as long as a task may take to start."""
    now, waited = [0.0], []

    def wait(refs, *, num_returns, timeout):
        waited.append(timeout)
        now[0] += timeout
        return [], refs

    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": []})
    monkeypatch.setattr(slots, "ray", SimpleNamespace(wait=wait, get_runtime_context=lambda: context))
    monkeypatch.setattr(slots, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(slots, "ask_head", lambda *_: {(0, 1): "task"})
    monkeypatch.setattr(slots, "alive_nodes", frozenset)
    monkeypatch.setattr(
        slots,
        "read_placed",
        lambda found, **_: [groups.Reserved(*found, (0, 0), ("node",) * 2, [*ROW["bundles"].values()])],
    )
    with pytest.raises(PlacementTimeoutError, match="did not finish within 3 s"):
        read_slots([group], timeout_s=3.0)
    assert sum(waited) == pytest.approx(3.0)
