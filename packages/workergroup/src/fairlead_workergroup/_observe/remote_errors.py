# SPDX-License-Identifier: Apache-2.0
"""The errors that methods raised in workers, as exceptions to raise to callers."""

import contextlib
import glob
import importlib.util
import os
import pickle
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError, UnserializableException

from .._model import Member
from ..exceptions import RemoteError


def explain_errors(errors: Mapping[Member, BaseException], method: str = "") -> BaseException:
    """Return the first worker's own exception, with the remote traceback as its cause and a note for each worker.

    It is a `RemoteError`, which has the remote traceback itself, if the class of the exception is not known here.
    """
    worker, first = next(iter(errors.items()))
    if type(first) is ray.exceptions.ActorUnavailableError or not isinstance(first, RayError):
        return first
    first.__suppress_context__ = True  # the error of another worker, with a traceback of its own
    shown: BaseException = first
    cause = getattr(first, "cause", None)
    if _is_unknown_here(first):
        shown = RemoteError(*_read_last_line(first), remote_traceback(first), worker.rank)
    elif isinstance(first, RayTaskError) and isinstance(cause, BaseException):
        shown = cause if not _is_of_result(first) else type(cause)(_explain_result(method, cause))
    if isinstance(shown, RemoteError):
        shown.__suppress_context__ = True
    elif shown is not first:
        shown.__cause__ = first
    for failing, error in errors.items():
        other = "" if error is first else f": {_type_name(error)}"
        shown.add_note(f"raised by {failing}{other}")
    return shown


def _is_of_result(error: RayTaskError) -> bool:
    """Return whether Ray could not pickle what a method has returned: the traceback has no frame of the method."""
    is_refusal = isinstance(error.cause, (TypeError, pickle.PicklingError)) and len(error.cause.args) == 1
    return is_refusal and "/_remote/host.py" not in remote_traceback(error)


def _explain_result(method: str, cause: BaseException) -> str:
    return (
        f"the result of {method!r} cannot be pickled: {cause}. The method has run to its end. Return plain data, "
        "arrays or tensors, or keep the value in the worker and call with discard=True."
    )


def _is_unknown_here(error: BaseException) -> bool:
    """Return whether an error stands for one whose class this process does not know."""
    return isinstance(error, UnserializableException) or type(getattr(error, "cause", None)) is RayError


def _read_last_line(error: BaseException) -> tuple[str, str]:
    """Return the full name of an exception's class and its message, from the last line of its remote traceback."""
    name, _, message = (remote_traceback(error).strip().splitlines() or ["unknown"])[-1].partition(": ")
    return name.strip(), message


def _type_name(error: BaseException) -> str:
    """Return the class name of the exception that a worker raised."""
    if _is_unknown_here(error):
        return _read_last_line(error)[0].rpartition(".")[2]
    return type(getattr(error, "cause", None) or error).__name__


def remote_traceback(error: Any) -> str:
    """Return the traceback in the worker as text, as far as Ray has it."""
    if isinstance(error, UnserializableException):
        return str(getattr(error, "_original_stack_trace", error))
    return str(getattr(error, "traceback_str", "")) or str(error)


def explain_missing_module(error: BaseException) -> str:
    """Return that a worker cannot import a module, and what to do about it; an empty text for other errors."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    folder = _find_folder(error.name.partition(".")[0])
    path = os.path.join(folder, *error.name.split("."))
    remedy = "Install it in the workers' Python, or give them a `python` that has it."
    if not folder:
        remedy = f"Check the name. {remedy} `env_vars={{'PYTHONPATH': folder}}` finds a module of your own."
    elif not glob.glob(path) and not glob.glob(f"{path}.*"):
        remedy = f"Check the name: the package in {folder} does not have it either."
    elif os.path.basename(folder) not in ("site-packages", "dist-packages"):
        remedy = (
            f"This process imports it from {folder}: if the nodes have that folder, give the workers "
            f'env_vars={{"PYTHONPATH": {folder!r}}}. Otherwise install the module in their Python.'
        )
    return f"its Python cannot import the module {error.name!r}. {remedy}"


def _find_folder(module: str) -> str:
    """Return the folder from which this process imports a module; an empty text if it does not."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(module)
        if spec is not None:
            return os.path.dirname(next(iter(spec.submodule_search_locations or [spec.origin or ""])))
    return ""
