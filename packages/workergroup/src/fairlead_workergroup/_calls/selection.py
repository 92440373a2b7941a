# SPDX-License-Identifier: Apache-2.0
"""The coordinates that a view of a group selects, which hold also after the group has been resized. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .._members import Resize
from ..exceptions import EpochError
from .plan import Mesh


@dataclass(frozen=True)
class Selection:
    """What one `at` selects.

    Attributes:
        coords: the coordinates, counted from the first one, by axis.
        largest: the largest coordinate along each axis that the group has to have.
    """

    coords: Mapping[str, int | slice]
    largest: Mapping[str, int]

    def apply(self, mesh: Mesh, resizes: Sequence[Resize]) -> Mesh:
        """Return the mesh of the selected workers.

        Args:
            mesh: the workers to select from.
            resizes: the resizes of the group so far.

        Raises:
            EpochError: the group does not have one of the coordinates any more.
        """
        for axis, largest in self.largest.items():
            size = mesh.sharding.get_axis_size(axis)
            if largest >= size:
                shrinks = [one for one in resizes if one.axis == axis and one.after < one.before]
                # The coordinate of a view of a view counts from the first one of that view.
                went = [one for one in shrinks if one.after <= largest < one.before] or shrinks
                raise EpochError(
                    f"This view needs {axis}={largest}, which the group does not have any more: it was resized "
                    f"{went[-1]}. The view works again when the group has grown.",
                    went[-1].epoch,
                )
        return mesh.at(dict(self.coords))


def select(mesh: Mesh, coords: Mapping[str, int | slice]) -> Selection:
    """Return the selection of valid coordinates, without those that are counted from the end.

    >>> from fairlead_sharding import NamedSharding
    >>> select(Mesh(NamedSharding.from_shape(dp=4)), {"dp": slice(-3, None)})
    Selection(coords={'dp': slice(1, None, 1)}, largest={'dp': 1})
    """
    fixed: dict[str, int | slice] = {}
    largest: dict[str, int] = {}
    for axis, value in coords.items():
        size = mesh.sharding.get_axis_size(axis)
        if not isinstance(value, slice):
            fixed[axis] = largest[axis] = value % size
            continue
        start, stop, step = value.indices(size)
        selected = range(start, stop, step)
        largest[axis] = max(selected)
        if step > 0:
            is_open = value.stop is None
            fixed[axis] = slice(start, None if is_open else stop, step)
            largest[axis] = start if is_open else largest[axis]
        else:
            fixed[axis] = slice(start, None if stop < 0 else stop, step)
    return Selection(fixed, largest)
