# SPDX-License-Identifier: Apache-2.0
"""Functions that are called in place of a method: their names, their parameters, and how they travel to workers."""

import functools
import inspect
import os
import site
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

from .._ray_private import dumps_by_value
from .._remote.describe import kind_of

__all__ = [
    "function_kind",
    "function_name",
    "full_function_name",
    "is_installed",
    "pickled_function",
    "signature_without_worker",
]


def function_name(function: Callable[..., Any]) -> str:
    """Return what errors and logs call a function.

    >>> function_name(os.path.join), function_name(functools.partial(max, 1))
    ('join', 'max')
    """
    while isinstance(function, functools.partial):
        function = function.func
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    if code is not None and name.endswith("<lambda>"):
        name = f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
    return name


def full_function_name(function: Any) -> str:
    """Return `module.Class.method` of a function; "" if it cannot be found by its name."""
    name = getattr(function, "__qualname__", "")
    return "" if not name or "<" in name else f"{getattr(function, '__module__', '')}.{name}"


def function_kind(function: Callable[..., Any]) -> str:
    """Return the kind of a function, as of a method: plain, generator, async or async_generator."""
    known = inspect.isroutine(function) or isinstance(function, functools.partial)
    return kind_of(function if known else type(function).__call__)


def signature_without_worker(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the parameters that a caller gives: all but the first; None when Python cannot tell.

    Raises:
        TypeError: the function has no positional parameter for the worker's instance.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    parameters = list(signature.parameters.values())
    first = parameters[0].kind if parameters else None
    if first is inspect.Parameter.VAR_POSITIONAL:
        return signature
    if first not in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
        raise TypeError(
            f"{function_name(function)}{signature} has no positional parameter. A function that is called in place of "
            "a method gets the worker's instance as its first argument: f(worker, ...)."
        )
    return signature.replace(parameters=parameters[1:])


def pickled_function(function: Callable[..., Any], shared: str | None) -> bytes:
    """Pickle a function so that workers without its module can run it.

    Functions and classes of modules that are not installed travel by value. Those of the standard library, of
    installed packages, and of the package that the workers import their class from travel by name: there the function
    must see the same module as the workers do.

    Args:
        function: what to pickle.
        shared: the top-level package of the class, if the workers import it by name.

    Raises:
        TypeError: it cannot be pickled; says which function, and what it refers to that cannot be.
    """

    def by_value(module: str) -> bool:
        return module.partition(".")[0] != shared and not is_installed(module)

    try:
        return dumps_by_value(function, by_value)
    except Exception as error:
        reason = _reason(function, by_value, error)
        raise TypeError(
            f"the function {function_name(function)!r} cannot be sent to the workers: {reason}. Pass what it needs as "
            "arguments, or make it inside the function."
        ) from error


def is_installed(module: str) -> bool:
    """Return whether a module is part of Python or of an installed package, rather than of the user's own code.

    >>> is_installed("json.decoder"), is_installed("ray.actor")
    (True, True)
    """
    package = module.partition(".")[0]
    # `current_worker` and the like are about the process that they run in, however Fairlead is installed here.
    if package in sys.stdlib_module_names or package.startswith("fairlead_"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    # Without a file it is built into an extension, or was made by hand: cloudpickle knows best.
    return file is None or os.path.abspath(file).startswith(_installation_folders())


@functools.cache
def _installation_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.update([*site.getsitepackages(), site.getusersitepackages()])
    return tuple(os.path.join(os.path.abspath(folder), "") for folder in folders)


def _reason(function: Callable[..., Any], by_value: Callable[[str], bool], error: Exception) -> str:
    """Return which variable of a function cannot be pickled and why, or else the error itself."""
    while isinstance(function, functools.partial):
        function = function.func
    used = inspect.getclosurevars(function) if inspect.isfunction(function) else None
    for name, value in {**used.nonlocals, **used.globals}.items() if used else ():
        try:
            dumps_by_value(value, by_value)
        except Exception as own:  # noqa: BLE001  whatever an object's own reduction raises
            return f"it uses {name!r}, a {type(value).__qualname__}: {_innermost(own)}"
    return _innermost(error)


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
