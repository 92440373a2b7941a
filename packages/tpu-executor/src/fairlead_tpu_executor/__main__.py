# SPDX-License-Identifier: Apache-2.0
"""`python -m fairlead_tpu_executor status`: the slices of a cluster, and who uses them."""

import argparse
import sys

import ray
from rich.console import Console

from fairlead_placement import PlacementError, init_ray
from fairlead_placement.spi import read_holders, read_nodes

from ._overview import as_table, slice_statuses


def main(argv: list[str] | None = None) -> int:
    """Run a command; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fairlead_tpu_executor", description=__doc__)
    commands = parser.add_subparsers(required=True)
    status = commands.add_parser("status", help="the slices of a cluster, and who uses them")
    status.add_argument("--address", default="auto", help="of the cluster; by default the one of RAY_ADDRESS or here")
    address: str = parser.parse_args(argv).address
    try:
        init_ray(address=address)
    except (PlacementError, ValueError) as error:
        print(error, file=sys.stderr)  # noqa: T201 - it is a program
        return 1
    try:
        Console().print(as_table(slice_statuses(read_nodes(), read_holders())))
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
