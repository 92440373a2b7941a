# SPDX-License-Identifier: Apache-2.0
"""The setup of a worker process before any code of the user: environment, devices, reaper, and published facts.

The reaper is a small process beside each worker, which ends the worker and its tree even if the driver and Ray have
been killed. It also enforces the limit of the worker's memory, and leaves its verdict in a file.
"""

import contextlib
import inspect
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Mapping
from typing import Any

import ray

from .._ray_private import limit_devices
from .node import verdict_of
from .process import VARIABLE, mark_tree, reap, start_tick
from .record import Record
from .stacks import write_stacks_on_signal

# Without a limit it sleeps in `poll`, and loads the code that ends trees afterwards, because that takes memory.
WAIT = """\
import select, sys
worker, raylet, program, pid, started, limit = map(int, sys.argv[1:7])
poll = select.poll()
poll.register(worker)
poll.register(raylet)
if not limit:
    poll.poll()
exec(open(program).read())
reap((pid, started), sys.argv[7], lambda within_s: bool(poll.poll(1000 * within_s)), limit, sys.argv[8])
"""
PROGRAM = inspect.getsource(sys.modules[reap.__module__])


def set_up(facts: dict[str, Any], record: Record) -> Any:
    """Set up this process, and publish the facts and the record; return what has to live as long as the process."""
    os.environ.update(facts["env"])
    fixed = show_devices(facts.pop("devices", {}), facts["env"])
    os.environ.update(fixed)
    facts.update(env={**facts["env"], **fixed}, fixed=tuple(fixed))
    page = None
    if "tree" in facts:
        page, limit = mark_tree(facts["tree"]), facts.pop("memory_limit")
        start_reaper(facts["tree"], limit, verdict_of(ray.get_runtime_context().get_actor_id()) if limit else "")
    write_stacks_on_signal()
    published = types.ModuleType("_fairlead_worker")
    published.__dict__.update(facts=facts, record=record)
    sys.modules["_fairlead_worker"] = published
    return page


def show_devices(facts: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, str]:
    """Limit which devices this process sees, and return its LOCAL_RANK, if it has devices that Ray can limit.

    The facts are those of `device_facts`. A variable of the worker that limits devices is taken as it is, and so is a
    LOCAL_RANK that is not the group's.
    """
    own = {kind: ids for kind, ids in ray.get_runtime_context().get_accelerator_ids().items() if ids}
    if not facts or not own:
        return {}
    shown: dict[str, list[str] | None] = {}
    for kind, ids in own.items():
        near = [device for slot in facts["slots"] for device in slot.get(kind, ())]
        seen = dict.fromkeys([*near, *ids]) if facts["visible"] == "node" else ids
        shown[kind] = limit_devices(kind, list(seen), env)
    kind, ids = next(iter(own.items()))
    visible = shown[kind]
    if visible is None:
        return {}
    rank = int(env.get("LOCAL_RANK", 0))
    if rank == facts["local_rank"] and ids[0] in visible:
        rank = visible.index(ids[0])
    if not 0 <= rank < len(visible):
        raise RuntimeError(
            f"LOCAL_RANK is {rank}, but the worker sees only {len(visible)} device(s) of kind {kind}: "
            f"{', '.join(visible)}. Look at what configure_worker returns."
        )
    return {"LOCAL_RANK": str(rank)}


def start_reaper(identity: str, limit: int = 0, verdict: str = "") -> None:
    """Start the reaper of this process as a child of init, because Ray kills the children of a worker that ends.

    Above `limit` bytes of memory of the worker and its descendants, 0 for any number, it writes both numbers into the
    file `verdict` and kills the worker.
    """
    pid, program = os.getpid(), os.memfd_create("fairlead-reaper")
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, program)
        os.write(program, PROGRAM.encode())
        os.lseek(program, 0, os.SEEK_SET)
        try:
            worker = os.pidfd_open(pid)  # no fork of the worker can hold back its end, as it could with a pipe
            stack.callback(os.close, worker)
            # Ray takes a raylet that was killed for alive until its parent, such as the driver, has waited for it.
            raylet = os.pidfd_open(int(os.environ.get("RAY_RAYLET_PID", pid)))
            stack.callback(os.close, raylet)
            about = map(str, (worker, raylet, program, pid, start_tick(pid), limit, identity, verdict))
            shell = subprocess.run(
                ["/bin/sh", "-c", '"$@" &', "sh", sys.executable, "-I", "-S", "-c", WAIT, *about],
                pass_fds=(worker, raylet, program),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={name: value for name, value in os.environ.items() if name != VARIABLE.decode()},
                start_new_session=True,
            )
            if shell.returncode:
                raise ChildProcessError("The shell could not fork: there may be too many processes.")
        except OSError as error:
            if limit:
                raise OSError(
                    f"memory_limit cannot be enforced: the worker's reaper does not start. {error}"
                ) from error
            warnings.warn(f"No reaper: what this worker starts may outlive a killed driver. {error}", stacklevel=2)


def identify_process() -> dict[str, Any]:
    """Return what only this process knows of itself, with the file to which Ray lets it write, if that is a file."""
    pid, log = os.getpid(), os.path.realpath("/proc/self/fd/2")
    node_id = ray.get_runtime_context().get_node_id()
    return {"pid": pid, "started": start_tick(pid), "node_id": node_id, "log": log if os.path.isfile(log) else ""}


def apply_facts(worker: Any, changes: Mapping[str, Any], layout: Any = None) -> None:
    """Publish changed facts about this worker, and a changed layout, in the variables of its environment too."""
    published = sys.modules["_fairlead_worker"]
    before: dict[str, Any] = published.facts
    # A process keeps the devices that it sees, and so its LOCAL_RANK, if that is their index.
    env = {name: value for name, value in changes.get("env", {}).items() if name not in before.get("fixed", ())}
    os.environ.update(env)
    # A new dict: code that holds the facts of one epoch must not see those of the next one in it.
    facts = {**before, **changes, "env": {**before["env"], **env}}
    published.facts = facts if layout is None else {**facts, "layout": layout}  # type: ignore[attr-defined]


def do_nothing(worker: Any) -> None:
    """Return when everything that was sent to this worker before has ended."""
