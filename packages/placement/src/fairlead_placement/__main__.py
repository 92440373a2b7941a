# SPDX-License-Identifier: Apache-2.0
"""`python -m fairlead_placement nodes`: a table of the nodes of a cluster and of who holds their resources."""

import argparse
import sys
from collections.abc import Sequence

from ._nodes.head import read_holders, read_nodes
from ._show import draw_nodes
from ._terminal import Output, add_command, attach, run_command

_EPILOG = """\
exit status:
  0  the nodes are shown
  2  the arguments are wrong
  3  the cluster cannot be reached, wants another token, or did not answer
  130 after Ctrl-C, 141 if the reader of the output has gone
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m fairlead_placement", description=__doc__)
    commands = parser.add_subparsers(required=True)
    what = "show what each node has, what is free, and who holds the rest"
    add_command(commands, "nodes", what, epilog=_EPILOG, json=False)
    address: str = parser.parse_args(arguments).address

    def command() -> int:
        output = Output()
        with attach(address):
            nodes = read_nodes()
            # What jobs ask for, without the names that mark a node.
            resources = {name for node in nodes for name in node.total if not name.startswith("node:")}
            names = sorted(resources.difference(("memory", "object_store_memory")))
            output.print(draw_nodes(nodes, read_holders(), names, title=""))
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
