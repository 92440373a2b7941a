# SPDX-License-Identifier: Apache-2.0
"""Exceptions whose pickled copies are complete, and without references of Ray. Shipped by value."""

import io
from typing import Any

import ray


class _Pickler(ray.cloudpickle.CloudPickler):  # type: ignore[misc]
    """Refuse references and actor handles.

    Ray pickles exceptions apart from their task, and would keep the objects for the life of the worker.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (ray.ObjectRef, ray.ObjectRefGenerator, ray.actor.ActorHandle)):
            raise TypeError(f"a {type(obj).__name__} cannot be part of an exception")
        return super().reducer_override(obj)


def make_portable(error: BaseException) -> None:
    """Change an exception so that its pickled copy has its class, its text and its attributes.

    If its own way of pickling fails to do that, the copy is made without a call of `__init__`, and without values that
    do not pickle; a note on the exception names these. If that fails too, the exception is not changed.
    """
    for member in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        make_portable(member)
    if _survives_pickling(error):
        return
    parts = [(f"argument {index}", value) for index, value in enumerate(error.args)]
    parts += [(f"attribute {name!r}", value) for name, value in vars(error).items()]
    left_out = [name for name, value in parts if not _pickles(value)]
    if left_out:
        error.add_note(f"left out on the way from the worker, as it does not pickle: {', '.join(left_out)}")
    args = tuple(value if _pickles(value) else f"<{type(value).__qualname__}>" for value in error.args)
    attributes = {name: value for name, value in vars(error).items() if _pickles(value)}
    cls = type(error)
    # Use the `__new__` of a built-in class, such as OSError: that of the user's class may take other arguments.
    native = next(base for base in cls.__mro__ if base.__module__ == "builtins" and "__new__" in vars(base))
    # Set `args` as an attribute too, because OSError leaves its arguments to the user's `__init__`.
    reduced = (native.__new__, (cls, *args), {**attributes, "args": args})
    vars(error)["__reduce_ex__"] = lambda protocol: reduced
    if type(_copy(error)) is not cls:
        del vars(error)["__reduce_ex__"]


def _survives_pickling(error: BaseException) -> bool:
    copy = _copy(error)
    try:
        return type(copy) is type(error) and str(copy) == str(error)
    except Exception:  # noqa: BLE001  a `__str__` of the user may need an attribute that the copy lacks
        return False


def _pickles(value: Any) -> bool:
    return _copy((value,)) is not None


def _copy(value: Any) -> Any:
    """Return a pickled copy of a value; None if it cannot be pickled."""
    with io.BytesIO() as file:
        try:
            _Pickler(file, 5).dump(value)
            return ray.cloudpickle.loads(file.getvalue())
        except Exception:  # noqa: BLE001  classes of the user may raise anything
            return None
