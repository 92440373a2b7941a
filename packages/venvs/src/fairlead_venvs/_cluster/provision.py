# SPDX-License-Identifier: Apache-2.0
"""From plans to environments on nodes: look everywhere, then build where there is none."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from .._build import node_task
from .._build.recipe import Outcome
from .._build.uv import Deadline
from .._planning.plan import Plan
from .._progress import Bars
from ..exceptions import VenvBuildError, VenvError
from .rpc import on_nodes, some

__all__ = ["DRIVER", "Done", "Errors", "provisioned"]

# What travels through Ray's object store to each node that builds.
LIMIT_BYTES = 2 * 2**30
# In the place of a node, for what is wrong wherever it would have gone.
DRIVER = ""

# What is ready, by folder and node.
Done = dict[str, dict[str, Outcome]]
# What went wrong, by folder and node.
Errors = dict[tuple[str, str], VenvError]


def provisioned(
    plans: Mapping[str, Plan], there: Mapping[str, str], deadline: Deadline, bars: Bars
) -> tuple[Done, Errors]:
    """What each node has of each environment in the end, by folder and node; and what went wrong."""
    done, errors = _looked(plans, there, deadline)
    missing = {
        folder: [node for node in there if node not in done[folder] and (folder, node) not in errors]
        for folder in plans
    }
    for folder, nodes in missing.items():
        try:
            if nodes:
                _check_size(plans[folder])
                plans[folder].check(deadline, bars.line(Path(folder).name))
        except VenvError as error:
            errors[folder, DRIVER] = error
            missing[folder] = []
    errors |= _made(plans, missing, there, done, deadline, bars)
    return done, errors


def _looked(plans: Mapping[str, Plan], there: Mapping[str, str], deadline: Deadline) -> tuple[Done, Errors]:
    """Ask each node what it has: it is all there is to do most of the time."""
    wanted = {where: (where, one.recipe.fingerprint, one.recipe.platform) for where, one in plans.items()}
    asked = [(folder, node) for folder in plans for node in there]
    answers = on_nodes(
        [(node, node_task.look_here, wanted[folder]) for folder, node in asked],
        there,
        doing="looking for the environment",
        deadline=deadline,
    )
    done: Done = {folder: {} for folder in plans}
    errors: Errors = {}
    for key, answer in zip(asked, answers, strict=True):
        if isinstance(answer, Outcome):
            done[key[0]][key[1]] = answer
        elif answer is not None:
            errors[key] = answer
    return done, errors


def _made(
    plans: Mapping[str, Plan],
    missing: Mapping[str, Sequence[str]],
    there: Mapping[str, str],
    done: Done,
    deadline: Deadline,
    bars: Bars,
) -> Errors:
    """Build what is missing; the outcomes go to `done`."""
    import ray

    asked = [(folder, node) for folder, nodes in missing.items() for node in nodes]
    if not asked:
        return {}
    calls = []
    for folder in dict.fromkeys(folder for folder, _ in asked):
        plan = plans[folder]
        shipped = [(name, one if isinstance(one, bytes) else one.read_bytes()) for name, one in plan.files]
        # Stored once, whatever the number of nodes.
        files = [ray.put(shipped)] if shipped else []
        recipe = dataclasses.asdict(plan.recipe)
        calls += [(node, node_task.build_here, (recipe, files, deadline.left())) for node in missing[folder]]

    def seen(pending: Sequence[int]) -> None:
        for folder, nodes in missing.items():
            waiting = [there[node] for number in pending for where, node in [asked[number]] if where == folder]
            if nodes:
                total = len(there)
                doing = f"waiting for {some(waiting)}" if waiting else ""
                bars.update(Path(folder).name, total - len(waiting), total, doing)

    answers = on_nodes(calls, there, doing="building the environment", deadline=deadline, seen=seen)
    errors: Errors = {}
    for (folder, node), answer in zip(asked, answers, strict=True):
        if isinstance(answer, Outcome):
            done[folder][node] = answer
        else:
            errors[folder, node] = answer or VenvBuildError("nothing was built", node=there[node])
    return errors


def _check_size(plan: Plan) -> None:
    total = sum(len(one) if isinstance(one, bytes) else one.stat().st_size for _, one in plan.files)
    if total > LIMIT_BYTES:
        raise VenvBuildError(
            f"the files of this spec have {total / 2**30:.1f} GiB, too much to ship to each node: put them into a "
            "folder that every node has, and name it in env={'UV_FIND_LINKS': ...}"
        )
