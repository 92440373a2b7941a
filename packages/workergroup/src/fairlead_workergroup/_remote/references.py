# SPDX-License-Identifier: Apache-2.0
"""Values that may hold references of Ray. Shipped by value."""

import contextlib
import io
import pickle
from typing import Any

import ray

PLAIN = frozenset({type(None), bool, int, float, str, bytes})


class _Pickler(ray.cloudpickle.CloudPickler):  # type: ignore[misc]
    """Pickle a value with None for references; `found` tells of them, and the rest must be picklable too."""

    found = False

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (ray.ObjectRef, ray.ObjectRefGenerator, ray.actor.ActorHandle)):
            self.found = True
            return type(None), ()
        return super().reducer_override(obj)


def dump(value: Any) -> list[Any] | None:
    """Return a pickled value and its buffers; None if it holds a reference, which would never be freed."""
    if type(value) in PLAIN:
        return [pickle.dumps(value, 5)]
    buffers: list[pickle.PickleBuffer] = []
    with io.BytesIO() as file:
        pickler = _Pickler(file, 5, buffers.append)
        pickler.dump(value)
        return None if pickler.found else [file.getvalue(), *(buffer.raw() for buffer in buffers)]


def has_references(value: Any) -> bool:
    """Return whether a value holds references or actor handles, as far as it can be pickled."""
    if type(value) in PLAIN:
        return False
    with io.BytesIO() as file:
        pickler = _Pickler(file, 5, lambda buffer: None)
        with contextlib.suppress(Exception):  # whoever sends the value reports that it cannot be pickled
            pickler.dump(value)
        return pickler.found
