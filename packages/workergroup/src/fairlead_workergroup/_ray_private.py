# SPDX-License-Identifier: Apache-2.0
"""Every use of a Ray API that is not public, each with its reason, and its fallback if there is one."""

import os
import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import ObjectRef, ObjectRefGenerator
from ray.core.generated.gcs_pb2 import ActorTableData

# The id of an object begins with that of the task that creates it, which ends with the 16 bytes of the id of the actor.
# Ray's methods for that are not documented.
TASK_BYTES = 24


def is_stream(reply: Any) -> bool:
    """Return whether a reply is that of a generator method. Reason: `completed` below is not documented."""
    return isinstance(reply, ObjectRefGenerator)


def end_of(reply: Any) -> Any:
    """Return the reference that is ready when a worker has finished: the value itself, or the end of a generator."""
    return reply.completed() if is_stream(reply) else reply


def limit_devices(kind: str, ids: Sequence[str], env: Mapping[str, str]) -> list[str] | None:
    """Let this process see only these accelerators of a kind, and return what it sees; None if that is unknown.

    If `env` has the variable that limits them, that counts. Where Ray was told to leave such variables alone
    (RAY_EXPERIMENTAL_NOSET_*), the process would see all devices of its node, so it forgets that it was told.

    Reason: the variable depends on the kind of the device and on who made it, which only Ray knows.
    Fallback: None. The process then sees what Ray has set for it, unchecked.
    """
    for name in [name for name in os.environ if name.startswith("RAY_EXPERIMENTAL_NOSET_")]:
        del os.environ[name]
    try:
        from ray._private.accelerators import get_accelerator_manager_for_resource

        manager: Any = get_accelerator_manager_for_resource(kind)
        variable = manager.get_visible_accelerator_ids_env_var()
        if variable is None:
            return None
        if variable not in env:
            manager.set_current_process_visible_accelerator_ids(list(ids))
    except (ImportError, AttributeError):
        return None
    # Ray removes the variable if the process may see everything.
    return os.environ[variable].split(",") if variable in os.environ else list(ids)


def session_folder() -> str:
    """Return the folder on this node for the files of this session of Ray, which has no public name."""
    return str(ray._private.worker._global_node.get_session_dir_path())


def actor_id_of_ref(ref: ObjectRef) -> str:
    """Return the id of the actor whose method creates an object, as hexadecimal text; it is part of the task's id."""
    return str(ref.binary()[TASK_BYTES - 16 : TASK_BYTES].hex())


def is_known_dead(handle: Any) -> bool:
    """Return whether this process knows that an actor is dead, without a request, as after a method's error.

    Reason: Ray's public ways ask the head. Fallback: False, and the next request to the actor meets the error.
    """
    core_worker = getattr(ray._private.worker.global_worker, "core_worker", None)
    read = getattr(core_worker, "get_local_actor_state", None)
    return read is not None and bool(read(handle._actor_id) == ActorTableData.DEAD)


def find_actors(*states: str) -> frozenset[str]:
    """Return the ids of this job's actors in some states, with a request for each; empty without this API.

    Reason: the public state API needs the dashboard.
    """
    read_table = getattr(ray._private.state.state, "actor_table", None)
    if read_table is None:
        return frozenset()
    job = ray.JobID(bytes.fromhex(ray.get_runtime_context().get_job_id()))
    return frozenset(actor_id for state in states for actor_id in read_table(None, job, state))


def lost_with(error: BaseException) -> str:
    """Return "node" or "owner" if an actor died with its node or its owner, "ray.kill" if it was killed; "" otherwise.

    Reason: Ray (2.60) reports that only in the text of its error. Fallback: "", and the kind of the loss is "killed".
    """
    text = str(error).split("\nLast ")[0]
    if "because its node has died" in text:
        return "node"
    if "killed by `ray.kill`" in text:
        return "ray.kill"
    return "owner" if "because its owner has died" in text or "placement group" in text else ""


def how_it_ended(error: BaseException) -> tuple[int | None, int | None]:
    """Return the exit code and the signal of a dead worker, which Ray (2.60) reports only in the text of its error."""
    # The output of the process may follow, which is not Ray's text.
    text = str(error).split("\nLast ")[0]
    by = re.search(r"The process receives a (SIG[A-Z0-9]+)", text)
    if by is not None and by[1] in signal.Signals.__members__:
        return None, int(signal.Signals[by[1]])
    # Ray sees `exit_actor()` also by a flag, while an async worker still cancels its other methods.
    code = re.search(r"Worker exits with an exit code (-?[0-9]+)|User requested to exit the actor", text)
    return (None if code is None else int(code[1] or 0)), None
