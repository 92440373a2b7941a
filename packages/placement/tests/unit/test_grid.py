# SPDX-License-Identifier: Apache-2.0
"""The drawing of a cluster."""

from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup
from rich.console import Console

from fairlead_placement import RayVirtualCluster, Slot
from fairlead_placement._show import draw


class Group:
    """A group for the drawing, which needs three attributes."""

    def __init__(self, prefix, *workers):
        self.name_prefix = prefix
        self.world_size = len(workers)
        self.worker_metadata = [
            {"node_idx": node_idx, "bundle_index": bundle_index, "global_rank": rank, "state": state}
            for rank, (node_idx, bundle_index, state) in enumerate(workers)
        ]


def slots_of(*places):
    """Return slots in the order given: (logical node, bundle)."""
    group = PlacementGroup(PlacementGroupID.from_random())
    return tuple(
        Slot(
            placement_group=group,
            bundle_index=bundle_index,
            node_idx=node_idx,
            node_id=f"{node_idx}abcdefgh",
            node_ip=f"10.0.0.{node_idx}",
            node_rank=node_idx,
            local_rank=at,
        )
        for at, (node_idx, bundle_index) in enumerate(places)
    )


def as_lines(renderable):
    console = Console(width=110)
    with console.capture() as captured:
        console.print(renderable)
    return [line.rstrip() for line in captured.get().splitlines()]


def read_grid(cluster, *groups, **options):
    return as_lines(cluster.grid(groups, **options))


def test_not_reserved():
    """The grid has a row per logical node, a cell per slot and a legend. Drawing reserves nothing; Ray does not run."""
    assert read_grid(RayVirtualCluster([4, 8, 2])) == [
        "Ray Cluster: 3 nodes, 14 GPUs",
        "┌────────┬─────┬─────┬─────┬─────┬─────┬─────┬─────┬─────┐",
        "│ node 0 │ 0.0 │ 0.1 │ 0.2 │ 0.3 │     │     │     │     │",
        "├────────┼─────┼─────┼─────┼─────┼─────┼─────┼─────┼─────┤",
        "│ node 1 │ 1.0 │ 1.1 │ 1.2 │ 1.3 │ 1.4 │ 1.5 │ 1.6 │ 1.7 │",
        "├────────┼─────┼─────┼─────┼─────┼─────┼─────┼─────┼─────┤",
        "│ node 2 │ 2.0 │ 2.1 │     │     │     │     │     │     │",
        "└────────┴─────┴─────┴─────┴─────┴─────┴─────┴─────┴─────┘",
        "n.s: slot s of logical node n (one GPU each), not reserved yet",
    ]


def test_unused_and_empty():
    """An unused logical node is marked; a cluster without bundles is shown as empty."""
    text = read_grid(RayVirtualCluster([0, 1], use_gpus=False))
    assert text[0] == "Ray Cluster: 1 node, 1 CPU"
    assert "│ node 0   │     │" in text
    assert "│ not used │     │" in text
    assert read_grid(RayVirtualCluster([0, 0])) == ["Empty Ray Cluster"]


def test_one_group():
    """Workers are in the cells of their slots, and a state that needs attention is shown. Names are not markup."""
    slots = slots_of((0, 1), (0, 0), (1, 0))  # physical order is not Ray's
    group = Group("<b>[red]policy</b>", (0, 0, "alive"), (0, 1, "stuck"), (1, 0, "dead"))

    assert as_lines(draw([2, 1], slots, {"GPU": 1.0}, [group], None)) == [
        "Ray Cluster: 2 nodes, 3 GPUs",
        "┌───────────────────┬───────┬─────┐",
        "│ node 0            │  0.0  │ 0.1 │",
        "│ 10.0.0.0 (0abcde) │  W 1  │ W 0 │",
        "│                   │ stuck │     │",
        "├───────────────────┼───────┼─────┤",
        "│ node 1            │  1.0  │     │",
        "│ 10.0.0.1 (1abcde) │  W 2  │     │",
        "│                   │ dead  │     │",
        "└───────────────────┴───────┴─────┘",
        "n.s: slot s of logical node n (one GPU each)",
        "W r: worker of rank r of <b>[red]policy</b> (3 workers)",
    ]


def test_two_groups(capsys):
    """With several groups, workers show the number of their group; the global view counts the groups, or one."""
    groups = [Group("policy", (0, 0, ""), (0, 1, "")), Group("", (0, 1, ""))]
    cluster = RayVirtualCluster([2])
    cluster.print_all_worker_groups(groups[0])
    assert "Worker Groups: 1" in capsys.readouterr().out
    cluster.print_all_worker_groups(groups)

    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "Ray Cluster Global View: 1 node, 2 GPUs, Worker Groups: 2",
        "┌────────┬───────┬───────┐",
        "│ node 0 │  0.0  │  0.1  │",
        "│        │ G0:W0 │ G0:W1 │",
        "│        │       │ G1:W0 │",
        "└────────┴───────┴───────┘",
        "n.s: slot s of logical node n (one GPU each), not reserved yet",
        "G0:W r: worker of rank r of policy (2 workers)",
        "G1:W r: worker of rank r of an unnamed group (1 worker)",
    ]


def test_printing(capsys):
    """`print_cluster_grid` prints what `grid` returns, with or without a group."""
    cluster = RayVirtualCluster([2])
    cluster.print_cluster_grid()
    assert "W 0" not in capsys.readouterr().out
    cluster.print_cluster_grid(Group("g", (0, 1, "")))
    assert "W 0" in capsys.readouterr().out
    Console().print(cluster.grid(title="Mine"))
    assert capsys.readouterr().out.startswith("Mine\n")
