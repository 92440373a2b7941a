# SPDX-License-Identifier: Apache-2.0
"""Every call on Ray that is not public, each with its reason and what happens without it."""

import io
import re
import signal
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import ray
from ray import ObjectRef, ObjectRefGenerator

__all__ = [
    "actor_id_of",
    "actor_id_of_ref",
    "actors_being_made",
    "dead_actors",
    "dumps_by_value",
    "how_it_ended",
    "object_sizes",
    "still_referenced",
    "task_of_future",
    "task_of_ref",
]


def object_sizes(refs: Sequence[ObjectRef]) -> list[int]:
    """Bytes of each object this process owns, without a request to anybody; 0 where it is not known.

    Experimental in Ray, and only counted with. Without it sizes are 0.
    """
    if not refs:
        return []  # Ray may have been shut down, and would raise
    try:
        from ray.experimental.locations import get_local_object_locations
    except ImportError:
        return [0] * len(refs)
    found = get_local_object_locations(list(refs))
    return [found.get(ref, {}).get("object_size") or 0 for ref in refs]


def still_referenced(ids: Iterable[bytes]) -> list[ObjectRef]:
    """Return references to those of these objects that this process still refers to, also as arguments of tasks.

    For Ray, an object that has been freed is one that is not there yet. Without this call none of them is known.
    """
    count = getattr(ray._private.worker.global_worker.core_worker, "get_all_reference_counts", dict)
    known: Collection[bytes] = count()  # hexadecimal
    return [ObjectRef(one) for one in ids if one.hex().encode() in known]


def actor_id_of(handle: Any) -> str:
    """The id of an actor, hexadecimal. Handles have no public attribute for it."""
    actor_id: str = handle._actor_id.hex()
    return actor_id


def actor_id_of_ref(ref: ObjectRef) -> str:
    """The id of the actor whose method makes an object, hexadecimal: part of the object's own id."""
    actor_id: str = ref.task_id().actor_id().hex()
    return actor_id


def task_of_ref(ref: ObjectRef) -> bytes:
    """The id of the task that makes an object, as that task sees its own."""
    task: bytes = ref.task_id().binary()
    return task


def task_of_future(future: Any) -> bytes:
    """The id of the task that makes an object, or the items of a generator."""
    return task_of_ref(future.completed() if isinstance(future, ObjectRefGenerator) else future)


def dead_actors() -> frozenset[str]:
    """The ids of this job's actors that are dead, in one request.

    `ray.util.state.list_actors` is public but needs the dashboard. Without this call a dead worker is found out when
    it is asked for something.
    """
    return _actors_in("DEAD")


def actors_being_made() -> frozenset[str]:
    """The ids of this job's actors that have been asked for and are not there yet, in two requests.

    Private for the reason that `dead_actors` has. Without this call actors are killed while Ray makes them.
    """
    return _actors_in("DEPENDENCIES_UNREADY") | _actors_in("PENDING_CREATION")


def _actors_in(state: str) -> frozenset[str]:
    job = ray.JobID(bytes.fromhex(ray.get_runtime_context().get_job_id()))
    return frozenset(ray._private.state.state.actor_table(None, job, state))


def how_it_ended(error: BaseException) -> tuple[int | None, int | None]:
    """Return the exit code and the signal with which a dead worker's process ended; None for what Ray does not say.

    Ray (2.60) writes both into the words of its error and nowhere else. Without these words both are None: they are for
    people, and nothing is decided by them.
    """
    # Before what the process printed, which Ray may append.
    said = str(error).split("\nLast ")[0]
    by = re.search(r"The process receives a (SIG[A-Z0-9]+)", said)
    if by is not None and by[1] in signal.Signals.__members__:
        return None, int(signal.Signals[by[1]])
    code = re.search(r"Worker exits with an exit code (-?[0-9]+)", said)
    return (None if code is None else int(code[1])), None


def dumps_by_value(value: Any, by_value: Callable[[str], bool]) -> bytes:
    """Pickle a value, with the functions and classes of some modules by value.

    `ray.cloudpickle.register_pickle_by_value` is public, but holds for the whole process: another thread that pickles
    an argument meanwhile would send a class of its own to the workers. Without these two private functions of
    cloudpickle, functions and classes that can be imported here travel by name.

    Args:
        value: what to pickle.
        by_value: whether the functions and classes of a module, given by name, travel by value.
    """
    reduce_class: Any = getattr(ray.cloudpickle.cloudpickle, "_dynamic_class_reduce", None)
    if reduce_class is None or not hasattr(ray.cloudpickle.CloudPickler, "_dynamic_function_reduce"):
        pickled: bytes = ray.cloudpickle.dumps(value)
        return pickled

    class Pickler(ray.cloudpickle.CloudPickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, (type, types.FunctionType)) and by_value(str(obj.__module__)):
                return reduce_class(obj) if isinstance(obj, type) else self._dynamic_function_reduce(obj)
            return super().reducer_override(obj)

    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()
