# SPDX-License-Identifier: Apache-2.0
"""The command line: its arguments and its tables."""

import argparse
import functools
import re
from collections.abc import Sequence

from ._cluster import RayVirtualCluster
from ._init import TAG
from ._nodes.head import read_holders, read_nodes
from ._ray_private import accelerator_names
from ._show import draw_nodes
from ._terminal import Output, add_command, attach, run_command

# The kinds of bundles, by their names as a command line may write them.
_KINDS = {name.upper(): name for name in ("CPU", *sorted(accelerator_names()))}
_SIZE = re.compile(r"(?:(?P<nodes>\d+)\s*x\s*)?(?P<each>\d+)\s*(?P<kind>[A-Za-z_]+)")
_EPILOG = """\
exit status:
  0  the answer is good: it fits
  1  it is not: it does not fit now
  2  the arguments are wrong
  3  the cluster cannot be reached, wants another token, or did not answer
  130 after Ctrl-C, 141 if the reader of the output has gone
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fairlead_placement",
        description="Shows what a Ray cluster has, and whether a request would fit.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="{nodes,explain}")
    add = functools.partial(add_command, commands, epilog=_EPILOG, json=False)
    nodes = add("nodes", "show what each node has, what is free, and who holds the rest")
    nodes.set_defaults(run=_nodes)
    explain = add("explain", "show whether a reservation would fit now, and else why not")
    explain.add_argument("request", type=_parse_request, help="such as '4x8 GPU' (4 nodes with 8 each), or '2 CPU'")
    explain.set_defaults(run=_explain)
    options = parser.parse_args(arguments)

    def command() -> int:
        output = Output()
        with attach(options.address):
            return int(options.run(options, output))

    return run_command(command)


def _parse_request(text: str) -> RayVirtualCluster:
    size = _SIZE.fullmatch(text.strip())
    if size is None or (kind := _KINDS.get(size["kind"].upper())) is None:
        raise argparse.ArgumentTypeError(f"must be like '4x8 GPU' or '16 CPU', got {text!r}")
    counts = [int(size["each"])] * int(size["nodes"] or 1)
    try:
        return RayVirtualCluster(counts, accelerators={} if kind == "CPU" else {kind: 1})
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def _nodes(options: argparse.Namespace, output: Output) -> int:
    nodes = read_nodes()
    # What jobs ask for, without the names that mark a node.
    resources = {name for node in nodes for name in node.total if not name.startswith(("node:", TAG))}
    names = sorted(resources.difference(("memory", "object_store_memory")))
    output.print(draw_nodes(nodes, read_holders(), names, title=""))
    return 0


def _explain(options: argparse.Namespace, output: Output) -> int:
    report = options.request.explain()
    output.print(report)
    return 0 if report.verdict == "fits" else 1
