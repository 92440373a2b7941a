# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures in the README of fairlead-placement: `nox -s pictures`.

Node ids and addresses are those of the machine that draws; everything else is as it would be anywhere.
"""

import io
from pathlib import Path

import ray
from rich.console import Console, RenderableType

from fairlead_placement import RayVirtualCluster, init_ray
from fairlead_workergroup import RayWorkerGroup

FOLDER = Path(__file__).parent.parent / "packages" / "placement" / "pictures"


class Worker:
    """Only there to be drawn."""


def save(name: str, drawn: RenderableType, width: int) -> None:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(drawn)
    FOLDER.mkdir(exist_ok=True)
    # A fixed id: drawing the same again changes nothing.
    console.save_svg(str(FOLDER / f"{name}.svg"), title=name, unique_id=name)
    print(f"wrote {FOLDER / name}.svg")


def main() -> None:
    init_ray(address="local", num_cpus=28)
    with RayVirtualCluster([4, 8, 2], use_gpus=False, enable_colocation=True) as cluster:
        tied = [(0, [0, 1]), (0, [2, 3]), (1, [0, 1]), (1, [2, 3])]
        with (
            RayWorkerGroup(cluster, Worker, name_prefix="policy") as policy,
            RayWorkerGroup(cluster, Worker, name_prefix="generation", bundle_indices_list=tied) as generation,
        ):
            title = "Ray Cluster Global View: 3 nodes, 14 CPUs, Worker Groups: 2"
            save("groups", cluster.grid([policy, generation], title=title), 104)
    ray.shutdown()


if __name__ == "__main__":
    main()
