# SPDX-License-Identifier: Apache-2.0
"""TPU types: the numbers of chips and hosts that a name such as "v4-16" stands for. Pure.

The numbers are Google's (https://cloud.google.com/tpu/docs/regions-zones, "TPU configurations"), as Ray reads them. Ray
starts from a topology, of which one type may have several, so it cannot answer for a type.
"""

import math
import re
from dataclasses import dataclass

from ._ray_private import topology_is_valid

# By generation, how many units of the number in a type make a chip (TensorCores, or chips), and the chips of the
# largest VM; the hosts of larger slices have 4 each.
GENERATIONS = {
    "v2": (2, 4),
    "v3": (2, 4),
    "v4": (2, 4),
    "v5p": (2, 4),
    "v5litepod": (1, 8),
    "v6e": (1, 8),
    "v7x": (2, 4),
}
_PATTERN = re.compile(r"(?:tpu-?v?|v)(\d+[a-z]*)(?:-(\d+))?")


@dataclass(frozen=True)
class TpuType:
    """A type of slice. Its name is as in the label `ray.io/tpu-pod-type`; an empty topology stands for any."""

    name: str
    generation: str
    topology: str
    chips: int
    chips_per_host: int

    @property
    def hosts(self) -> int:
        """The number of hosts of a whole slice."""
        return self.chips // self.chips_per_host


def canonical_name(name: str) -> str:
    """Return the one name of a type or generation: "v7x-16" for "TPU7x-16"; other text in lower case."""
    text = name.strip().lower()
    if (match := _PATTERN.fullmatch(text)) is None:
        return text
    generation = "v5litepod" if match[1] == "5e" else f"v{match[1]}"
    return generation + (f"-{int(match[2])}" if match[2] else "")


def tpu_type(name: str, *, topology: str | None = None, chips_per_vm: int | None = None) -> TpuType:
    """Return the type with a name: a generation, and its TensorCores (v2 to v4, v5p, v7x) or chips (v5litepod, v6e)."""
    if not isinstance(name, str):
        raise TypeError(f"A TPU type must be a string such as 'v4-16', got {name!r}.")
    generation, _, size = canonical_name(name).partition("-")
    if generation not in GENERATIONS or not size.isdigit():
        raise ValueError(
            f"{name!r} is not a TPU type. A type is a generation and a size, such as 'v4-16'; the generations are "
            f"{', '.join(GENERATIONS)} (v5e is v5litepod)."
        )
    units, largest_vm = GENERATIONS[generation]
    chips, rest = divmod(int(size), units)
    if chips == 0 or rest:
        raise ValueError(
            f"{name!r} is not a TPU type: the number counts {'chips' if units == 1 else 'TensorCores, 2 per chip'}."
        )
    per_host = chips_per_vm if chips_per_vm is not None else chips if chips <= largest_vm else 4
    if isinstance(per_host, bool) or per_host not in (1, 2, 4, 8) or chips % per_host:
        raise ValueError(
            f"{name!r} has {chips} chip(s), which hosts of {per_host!r} chips cannot share: a host has 1, 2, 4 or 8, "
            "and all hosts of a slice have the same number (chips_per_vm)."
        )
    text = "" if topology is None else topology.strip().lower()
    # Ray's table lacks the topology of single hosts of the oldest generations.
    is_known = topology is None or (generation in ("v2", "v3") and text == "2x2") or topology_is_valid(generation, text)
    if topology is not None and (not is_known or math.prod(map(int, text.split("x"))) != chips):
        raise ValueError(
            f"{topology!r} is not a topology of {name!r}, which has {chips} chips. A topology looks like '2x2x2', or "
            f"like '2x4' for v2, v3, v5litepod and v6e, and is in Ray's table of {generation}."
        )
    return TpuType(f"{generation}-{int(size)}", generation, text, chips, per_host)
