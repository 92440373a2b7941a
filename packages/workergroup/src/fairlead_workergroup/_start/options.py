# SPDX-License-Identifier: Apache-2.0
"""Options of an actor: merged deep, and checked against what its slot holds."""

import copy
from collections.abc import Mapping
from typing import Any

from fairlead_placement import Slot

__all__ = ["actor_options", "check_concurrency", "recursive_merge_options"]

# The group decides these: where an actor runs, under which name, and that a restart is the group's business.
_OURS = (
    "get_if_exists",
    "label_selector",
    "lifetime",
    "max_restarts",
    "max_task_retries",
    "name",
    "namespace",
    "num_cpus",
    "num_gpus",
    "placement_group",
    "placement_group_bundle_index",
    "placement_group_capture_child_tasks",
    "scheduling_strategy",
)


def recursive_merge_options(default_options: Mapping[str, Any], extra_options: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two sets of Ray options: dicts deep, anything else replaced by `extra_options`. Neither input is changed.

    Compatible with the original system.

    A `_nsight` entry at the top of `runtime_env` becomes `nsight`, Ray's own name.

    >>> recursive_merge_options({"runtime_env": {"env_vars": {"A": "1"}}}, {"runtime_env": {"env_vars": {"B": "2"}}})
    {'runtime_env': {'env_vars': {'A': '1', 'B': '2'}}}
    """
    merged = _merged(default_options, extra_options)
    runtime_env = merged.get("runtime_env")
    if isinstance(runtime_env, dict) and "_nsight" in runtime_env:
        runtime_env["nsight"] = runtime_env.pop("_nsight")
    return merged


def _merged(default: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    merged = {name: copy.deepcopy(value) for name, value in default.items()}
    for name, value in extra.items():
        below = merged.get(name)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[name] = _merged(below, value)
        else:
            merged[name] = copy.deepcopy(value)
    return merged


def check_concurrency(options: Mapping[str, Any], *, concurrent: bool) -> None:
    """Refuse options that would make Ray run a worker's methods on several threads.

    Args:
        options: the options of an actor.
        concurrent: whether the worker is an asyncio actor, in which `max_concurrency` bounds how many methods overlap.

    Raises:
        ValueError: such an option is given.
    """
    if options.get("concurrency_groups"):
        raise ValueError(
            "concurrency_groups would run the methods of a worker on several threads, and its methods run one at a "
            "time. Remove the option; async methods overlap in a group with async_communication=True."
        )
    if not concurrent and options.get("max_concurrency", 1) not in (None, 1):
        raise ValueError(
            f"max_concurrency={options['max_concurrency']!r} would run the methods of a worker on several threads, "
            "and its methods run one at a time. Remove the option; async methods overlap in a group with "
            "async_communication=True."
        )


def actor_options(
    slot: Slot,
    *,
    of_class: Mapping[str, Any],
    resources: Mapping[str, Any],
    runtime_env: Mapping[str, Any],
    concurrent: bool = False,
) -> dict[str, Any]:
    """The Ray options of a worker in a slot, without its name and its scheduling strategy.

    Args:
        slot: what it may ask for.
        of_class: the default options of the user's class.
        resources: what `configure_worker` answered; `num_gpus` and `num_cpus` are honoured.
        runtime_env: what its process needs; empty keeps Ray's prestarted processes.
        concurrent: whether its async methods are to overlap.

    Raises:
        ValueError: it asks for something that the slot does not hold, and Ray would leave it pending without a word;
            or for several threads.
    """
    options = {name: value for name, value in of_class.items() if name not in _OURS and value is not None}
    options.pop("runtime_env", None)
    options = recursive_merge_options(
        options, {n: v for n, v in resources.items() if n not in ("num_cpus", "num_gpus")}
    )
    check_concurrency(options, concurrent=concurrent)
    options["num_cpus"] = resources.get("num_cpus", slot.worker_resources.get("CPU", 0))
    options["num_gpus"] = resources.get("num_gpus", slot.worker_resources.get("GPU", 0))
    others = {n: v for n, v in slot.worker_resources.items() if n not in ("CPU", "GPU")}
    if others:
        options["resources"] = {**others, **options.get("resources", {})}
    bundle = slot.placement_group.bundle_specs[slot.bundle_index]
    asked = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], **options.get("resources", {})}
    if options.get("memory"):
        asked["memory"] = options["memory"]
    for name, amount in asked.items():
        if amount > bundle.get(name, 0):
            raise ValueError(
                f"a worker asks for {amount:g} {name}, but its bundle holds {bundle.get(name, 0):g}: {dict(bundle)}. "
                "Ask for less, or reserve bundles that hold it (node_resource_constraints)."
            )
    if runtime_env:
        options["runtime_env"] = dict(runtime_env)
    return options
