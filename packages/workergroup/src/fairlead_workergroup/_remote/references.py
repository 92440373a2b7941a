# SPDX-License-Identifier: Apache-2.0
"""Values that may hold references of Ray, and references that a worker borrows for one call. Shipped by value."""

import contextlib
import io
import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

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
    frame = _dump(value, buffers.append)
    return None if frame is None else [frame, *(buffer.raw() for buffer in buffers)]


def _dump(value: Any, keep: Callable[[pickle.PickleBuffer], None] | None) -> bytes | None:
    with io.BytesIO() as file:
        pickler = _Pickler(file, 5, keep)
        pickler.dump(value)
        return None if pickler.found else file.getvalue()


def dump_error(name: str, error: BaseException, *, package: str, address: str) -> tuple[Any, list[bytes] | None]:
    """Return an exception of a method in the form in which Ray reports it, and its frames: it is pickled, and its text.

    The frames are None if it holds a reference. The first frames of the traceback that belong to `package`, which has
    called the method, are left out. `address` is that of the node.
    """
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_globals["__name__"].startswith(package):
        inner = inner.tb_next
    text = "".join(traceback.format_exception(type(error), error, inner))
    where = {"pid": os.getpid(), "ip": address}
    try:
        shown = RayTaskError(name, text, error, **where)
        frame = _dump(shown, None)
    except Exception as problem:  # noqa: BLE001  how a class of the user pickles may raise anything
        plain = RayError(f"{type(error).__qualname__} cannot be pickled: {type(problem).__qualname__}: {problem}")
        shown = RayTaskError(name, text, plain, **where)
        frame = _dump(shown, None)
    return shown, None if frame is None else [frame, text.encode(errors="replace")]


def has_references(value: Any) -> bool:
    """Return whether a value holds references or actor handles, as far as it can be pickled."""
    if type(value) in PLAIN:
        return False
    with io.BytesIO() as file:
        pickler = _Pickler(file, 5, lambda buffer: None)
        with contextlib.suppress(Exception):  # whoever sends the value reports that it cannot be pickled
            pickler.dump(value)
        return pickler.found


def borrow(binary: bytes, owner: bytes, status: bytes) -> Any:
    """Return a reference that lasts as long as this call; a pickled one would last as long as the driver."""
    own: Any = ray
    ref = own.ObjectRef(binary, owner)
    worker = own._private.worker.global_worker
    worker.core_worker.deserialize_and_register_object_ref(binary, ray.ObjectRef.nil(), owner, status)
    return ref
