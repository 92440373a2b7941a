# SPDX-License-Identifier: Apache-2.0
"""Exceptions that reach the caller with their own type. Shipped by value, as `_host` is: the standard library and Ray.

Pickle rebuilds an exception by calling its class with `args`. That fails if the constructor needs other arguments,
gives another text if it makes the text from its arguments, and is impossible if the exception holds a lock or a file.
"""

from typing import Any

import ray

__all__ = ["make_portable"]


def make_portable(error: BaseException) -> None:
    """Have an exception pickle so that its copy has its class, its text and its attributes.

    Where its own way of pickling does not do that, its copy is made without calling `__init__`, and without what does
    not pickle; a note on the exception names what is left out. An exception that cannot be copied in this way either
    is left as it is.
    """
    for member in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        make_portable(member)
    if _is_kept(error):
        return
    left_out = [f"argument {at}" for at, value in enumerate(error.args) if not _pickles(value)]
    left_out += [f"attribute {name!r}" for name, value in vars(error).items() if not _pickles(value)]
    if left_out:
        error.add_note(f"left out on the way from the worker, as it does not pickle: {', '.join(left_out)}")
    args = tuple(value if _pickles(value) else f"<{type(value).__qualname__}>" for value in error.args)
    attributes = {name: value for name, value in vars(error).items() if _pickles(value)}
    cls = type(error)
    # That of a class of Python's own, such as OSError: a `__new__` of the user's may want other arguments.
    native = next(base for base in cls.__mro__ if base.__module__ == "builtins" and "__new__" in vars(base))
    # Also an attribute, as OSError leaves its arguments to an `__init__` of the user's.
    reduced = (native.__new__, (cls, *args), {**attributes, "args": args})
    vars(error)["__reduce_ex__"] = lambda protocol: reduced
    if type(_copied(error)) is not cls:
        del vars(error)["__reduce_ex__"]


def _is_kept(error: BaseException) -> bool:
    copy = _copied(error)
    try:
        return type(copy) is type(error) and str(copy) == str(error)
    except Exception:  # noqa: BLE001  its __str__ is the user's, and may want what the copy lacks
        return False


def _pickles(value: Any) -> bool:
    return _copied((value,)) is not None


def _copied(value: Any) -> Any:
    """Return what a value is when it has travelled; None if it cannot."""
    try:
        return ray.cloudpickle.loads(ray.cloudpickle.dumps(value))
    except Exception:  # noqa: BLE001  whatever the user's classes raise
        return None
