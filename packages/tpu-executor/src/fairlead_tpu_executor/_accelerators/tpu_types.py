# SPDX-License-Identifier: Apache-2.0
"""TPU types: the numbers of chips and hosts that a name such as "v4-16" stands for. Pure.

The numbers are Google's (https://cloud.google.com/tpu/docs/regions-zones, "TPU configurations"), as Ray reads them.
"""

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from .._ray_private import topology_is_valid


class Generation(NamedTuple):
    """How the types of a generation count."""

    cores_per_chip: int  # 1 where the number in a type counts chips
    largest_vm: int  # in chips; the hosts of larger slices have 4 each


GENERATIONS = {
    "v2": Generation(2, 4),
    "v3": Generation(2, 4),
    "v4": Generation(2, 4),
    "v5p": Generation(2, 4),
    "v5litepod": Generation(1, 8),
    "v6e": Generation(1, 8),
    "v7x": Generation(2, 4),
}
_ALIASES = {"v5e": "v5litepod"}
_PATTERN = re.compile(r"(?:tpu-?v?|v)(\d+[a-z]*)(?:-(\d+))?")
_CHIPS_PER_VM = (1, 2, 4, 8)


@dataclass(frozen=True)
class TpuType:
    """A type of slice."""

    name: str  # as in the label `ray.io/tpu-pod-type`
    generation: str
    topology: str  # empty for any
    chips: int
    chips_per_host: int

    @property
    def hosts(self) -> int:
        """The number of hosts of a whole slice."""
        return self.chips // self.chips_per_host


def canonical_name(name: str) -> str:
    """Return the one name of a type or generation: "v7x-16" for "TPU7x-16"; other text in lower case."""
    text = name.strip().lower()
    match = _PATTERN.fullmatch(text)
    if match is None:
        return text
    generation = f"v{match[1]}"
    return _ALIASES.get(generation, generation) + (f"-{int(match[2])}" if match[2] else "")


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
    facts = GENERATIONS[generation]
    chips, rest = divmod(int(size), facts.cores_per_chip)
    if chips == 0 or rest:
        unit = "chips" if facts.cores_per_chip == 1 else "TensorCores, 2 per chip"
        raise ValueError(f"{name!r} is not a TPU type: the number counts {unit}.")
    usual = chips if chips <= facts.largest_vm else 4
    per_host = usual if chips_per_vm is None else chips_per_vm
    if isinstance(per_host, bool) or per_host not in _CHIPS_PER_VM or chips % per_host:
        raise ValueError(
            f"{name!r} has {chips} chip(s), which hosts of {per_host!r} chips cannot share: a host has 1, 2, 4 or 8, "
            "and all hosts of a slice have the same number (chips_per_vm)."
        )
    text = "" if topology is None else topology.strip().lower()
    if topology is not None:
        if not re.fullmatch(r"\d+(x\d+)+", text) or math.prod(map(int, text.split("x"))) != chips:
            raise ValueError(
                f"{topology!r} is not a topology of {name!r}, which has {chips} chips. A topology looks like '2x2x2', "
                "or like '2x4' for v2, v3, v5litepod and v6e."
            )
        # Ray's table lacks the topology of single hosts of the oldest generations.
        if not topology_is_valid(generation, text) and not (generation in ("v2", "v3") and text == "2x2"):
            raise ValueError(f"{topology!r} is not a topology of {name!r}: Ray's table of {generation} lacks it.")
    return TpuType(f"{generation}-{int(size)}", generation, text, chips, per_host)
