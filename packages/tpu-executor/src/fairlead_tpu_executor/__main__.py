# SPDX-License-Identifier: Apache-2.0
"""`python -m fairlead_tpu_executor status`: a table of the slices of a cluster and their users."""

import argparse
import contextlib
import sys
from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fairlead_placement import Node, ResourceHolder, extension

from ._slices import TOPOLOGY, TYPE, SliceInfo, assess_slices, canonical_name, tpu_type

_EPILOG = """\
exit status:
  0  the slices are shown
  2  the arguments are wrong
  3  the cluster cannot be reached, wants another token, or did not answer
  130 after Ctrl-C, 141 if the reader of the output has gone
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fairlead_tpu_executor", description=__doc__)
    commands = parser.add_subparsers(required=True)
    extension.add_command(commands, "status", "show the slices of a cluster and their users", epilog=_EPILOG)
    address: str = parser.parse_args(argv).address

    def command() -> int:
        output = extension.Output()
        with extension.attach(address):
            output.print(make_table(slice_rows(extension.read_nodes(), extension.read_holders())))
        return 0

    return extension.run_command(command)


def slice_rows(nodes: Sequence[Node], holders: Sequence[ResourceHolder]) -> list[tuple[str, ...]]:
    """Return the cells of every slice with at least one host that is alive and not draining, by type and name. Pure."""
    rows: dict[str, tuple[str, ...]] = {}
    for kind in sorted({canonical_name(node.labels[TYPE]) for node in nodes if TYPE in node.labels}):
        members = [node for node in nodes if canonical_name(node.labels.get(TYPE, "")) == kind]
        per_vm = int(max(node.total.get("TPU", 0) for node in members))
        wanted = None
        for chips in (None, per_vm):  # of a usual host, or of these
            with contextlib.suppress(ValueError):
                wanted = tpu_type(kind, chips_per_vm=chips)
        if wanted is None:
            name = f"hosts of type {kind}"
            rows[name] = (name, kind, "", f"{len(members)}/?", "its type is unknown", _users(members, holders))
            continue
        assessed = assess_slices(nodes, wanted).items()
        for name, (place, hosts) in sorted(assessed, key=lambda row: not isinstance(row[1][0], SliceInfo)):
            topology = ", ".join(sorted({node.labels.get(TOPOLOGY, "") for node in hosts}))
            state = "whole" if isinstance(place, SliceInfo) else place
            rows[name] = (name, kind, topology, f"{len(hosts)}/{wanted.hosts}", state, _users(hosts, holders))
    return list(rows.values())


def _users(hosts: Sequence[Node], holders: Sequence[ResourceHolder]) -> str:
    users = []
    named = 0.0
    for holder in holders:
        held = sum(bundle.get("TPU", 0) for node in hosts for bundle in holder.bundles.get(node.node_id, ()))
        named += held
        if held:
            users.append(f"{holder.kind} {holder.name or 'without a name'} (job {holder.job_id}): {held:g} TPU")
    used = sum(node.total.get("TPU", 0) - node.free.get("TPU", 0) for node in hosts)
    users += [f"tasks: {used - named:g} TPU"] if used - named > 1e-4 else []
    return "\n".join(users) or "nobody"


def make_table(rows: Sequence[Sequence[str]]) -> RenderableType:
    if not rows:
        return Text("No host of this cluster has the labels of a TPU slice.")
    table = Table("slice", "type", "topology", "hosts", "state", "used by", title="TPU slices", title_justify="left")
    for row in rows:
        table.add_row(*map(Text, row))  # as Text, because a name may contain what looks like markup
    return table


if __name__ == "__main__":
    sys.exit(main())
