# SPDX-License-Identifier: Apache-2.0
"""The axis along which a group grows and shrinks, and its mesh of another size. Pure."""

from collections.abc import Mapping, Sequence

import numpy as np

from fairlead_sharding import NamedSharding

from .._model import Place


def find_elastic_axis(sharding: NamedSharding) -> str | None:
    """Return the slowest-varying axis, each of whose coordinates has a block of consecutive ranks; None without one.

    >>> find_elastic_axis(NamedSharding.from_shape(dp=2, tp=4))
    'dp'
    >>> find_elastic_axis(NamedSharding([[3, 1], [2, 0]], ["dp", "tp"])) is None
    True
    """
    ascending = np.arange(sharding.size)
    for number, name in enumerate(sharding.names):
        rows = np.moveaxis(sharding.layout, number, 0).reshape(sharding.get_axis_size(name), -1)
        if (np.sort(rows, axis=1).ravel() == ascending).all():
            return name
    return None


def check_sizes(sharding: NamedSharding, elastic: str | None, sizes: Mapping[str, int]) -> tuple[str, int]:
    """Return the axis and the size that a resize requests."""
    if len(sizes) != 1:
        raise ValueError(f"resize takes one axis with its new size, such as dp=6, got {dict(sizes)}")
    ((axis, size),) = sizes.items()
    sharding.get_axis_index(axis)
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"the size of an axis must be a whole number, got {axis}={size!r}")
    if size < 1:
        raise ValueError(f"the size of an axis must be at least 1, got {axis}={size}")
    if elastic is None:
        raise ValueError(
            f"{sharding!r} has no slowest-varying axis, whose coordinates have consecutive ranks each, so it cannot be "
            "resized: ranks would have to move. Use a mesh such as NamedSharding.from_shape(dp=2, tp=4)."
        )
    if axis != elastic:
        raise ValueError(
            f"this group can be resized along {elastic!r} only, its slowest-varying axis: along {axis!r} the ranks of "
            "other workers would change. Start a new group for that."
        )
    return axis, size


def resize_mesh(sharding: NamedSharding, axis: str, size: int) -> NamedSharding:
    """Return the mesh with another size of its elastic axis; new coordinates have the order of the first one.

    >>> resize_mesh(NamedSharding.from_shape(dp=1, tp=2), "dp", 3).layout.tolist()
    [[0, 1], [2, 3], [4, 5]]
    """
    number, before = sharding.get_axis_index(axis), sharding.get_axis_size(axis)
    kept = np.moveaxis(sharding.layout, number, 0)[:size]
    each = sharding.size // before
    added = [kept[0] + at * each for at in range(before, size)]
    return NamedSharding(np.moveaxis(np.stack([*kept, *added]), 0, number), sharding.names)


def check_tied_groups(places: Sequence[Place], each: int, size: int) -> None:
    """Refuse a resize to `size` ranks, `each` at a coordinate, that would cut a tied group."""
    sizes = {len(place.tied_bundles[1]) for place in places}
    tied = len(places[0].tied_bundles[1])
    if len(sizes) > 1 and size > len(places):
        raise ValueError(
            f"the tied groups of this group have {sorted(sizes)} workers, so the size of a new one is not known. Only "
            "a group whose tied groups have one size can grow."
        )
    if each % tied if size > len(places) else size < len(places) and places[size].tied_rank:
        raise ValueError(
            f"a resize would cut a tied group, whose workers share one model copy: each coordinate has {each} ranks, "
            f"and the tied groups have {sorted(sizes)} workers. Resize by whole tied groups."
        )
