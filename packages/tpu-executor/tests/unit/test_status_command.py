# SPDX-License-Identifier: Apache-2.0
"""The table of slices, from nodes as Ray lists them."""

import io

from ray.util.tpu import get_chips_per_host
from rich.console import Console

from fairlead_placement import Node, ResourceHolder
from fairlead_tpu_executor.__main__ import make_table, slice_rows


def host(name, worker, kind, topology, tpus=4.0, used=0.0):
    values = {"slice-name": name, "worker-id": str(worker), "topology": topology, "pod-type": kind}
    labels = {f"ray.io/tpu-{label}": value for label, value in values.items()}
    resources = {"TPU": tpus}
    return Node(f"{name}{worker}".ljust(12, "0"), "10.0.0.1", resources, {"TPU": tpus - used}, labels)


def shown(rows):
    console = Console(file=io.StringIO(), width=120)
    console.print(make_table(rows))
    return console.file.getvalue()


def test_statuses():
    """Whole and broken slices are listed by type and name, with their users; the rest of the use counts as tasks."""
    nodes = [
        host("b", 1, "v4-16", "2x2x2", used=4.0),
        host("b", 0, "v4-16", "2x2x2", used=4.0),
        host("a", 0, "v4-16", "2x2x2", used=1.0),
        host("small", 0, "v6e-8", "2x4", tpus=4.0),
        host("small", 1, "v6e-8", "2x4", tpus=4.0),
        host("odd", 0, "v99-8", "?"),
        Node("plain", "10.0.0.9", {"CPU": 1.0}, {}, {}),
    ]
    group = ResourceHolder("placement group", "train[/b]", "1" * 36, "01000000", {"b00000000000": ({"TPU": 4.0},) * 2})
    rows = slice_rows(nodes, [group])
    assert rows == [
        ("b", "v4-16", "2x2x2", "2/2", "whole", "placement group train[/b] (job 01000000): 8 TPU"),
        ("a", "v4-16", "2x2x2", "1/2", "1 of 2 hosts, worker 1 is missing", "tasks: 1 TPU"),
        ("small", "v6e-8", "2x4", "2/2", "whole", "nobody"),
        ("hosts of type v99-8", "v99-8", "", "1/?", "its type is unknown", "nobody"),
    ]
    text = shown(rows)
    assert "train[/b]" in text
    assert "1/?" in text
    assert text.count("nobody") == 2


def test_two_resources_per_chip():
    """A host with 4 chips of 2 cores each may have 8 of the resource, and is not a slice by itself."""
    assert get_chips_per_host("2x2x2", "v7x") == 4
    nodes = [host("a", worker, "v7x-16", "2x2x2", tpus=8.0) for worker in (0, 1)]
    assert [row[3:5] for row in slice_rows(nodes, [])] == [("2/2", "whole")]
    assert [row[3:5] for row in slice_rows(nodes[1:], [])] == [("1/2", "1 of 2 hosts, worker 0 is missing")]


def test_hosts_without_the_name_of_a_slice():
    """Hosts that no label assigns to a slice are counted, with who uses them."""
    nodes = [host("", worker, "v4-16", "2x2x2", used=4.0) for worker in (0, 1)]
    (row,) = slice_rows(nodes, [])
    assert row[3:] == ("2/2", "no label tells which of them form a slice", "tasks: 8 TPU")


def test_no_slices():
    """A cluster without TPUs says so."""
    assert "No host of this cluster" in shown(slice_rows([Node("n", "i", {}, {}, {})], []))
