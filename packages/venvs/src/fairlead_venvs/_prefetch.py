# SPDX-License-Identifier: Apache-2.0
"""Makes the environments of many worker classes ready at once, before they are needed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ._build.recipe import Outcome
from ._build.uv import Deadline, Session
from ._cluster.ensure import Answers, provision
from ._cluster.rpc import alive_nodes
from ._local import ensure_here
from ._planning.plan import Plan, plan_venv
from ._planning.spec import is_uv_command
from ._progress import Status
from ._registry import get_actor_python_env, known_actor_environments
from ._spec import as_spec
from .exceptions import VenvError

# In the place of a node, for this machine.
HERE = ""


@dataclass(frozen=True)
class Fetched:
    """The result for the environment of one class: "built", "reused", "skipped" for an interpreter, or "failed"."""

    fqn: str
    status: str
    detail: str


def prefetch(
    classes: Sequence[str] = (), *, cluster: bool = False, timeout_s: float = 1800, progress: bool = True
) -> list[Fetched]:
    """Make the environments of worker classes ready, by default of all that are registered or in the pyproject.toml."""
    deadline = Deadline(timeout_s)
    done: dict[str, Fetched] = {}
    plans: dict[str, Plan] = {}
    wanted = list(dict.fromkeys(classes)) or list(known_actor_environments())
    nodes = alive_nodes() if cluster else None
    with Status(shown=progress) as status:
        for fqn in wanted:
            try:
                what = get_actor_python_env(fqn)
                if isinstance(what, str) and not is_uv_command(what):
                    done[fqn] = Fetched(fqn, "skipped", what)
                else:
                    plans[fqn] = plan_venv(as_spec(what), None, Session(deadline, status.line("wheels")))
            except (ValueError, TypeError, VenvError) as error:
                done[fqn] = Fetched(fqn, "failed", str(error))
        distinct = {plan.recipe.folder: plan for plan in plans.values()}
        answers = provision(distinct, nodes, deadline, status) if nodes else _provision_here(distinct, deadline, status)
    reported: set[str] = set()
    for fqn, plan in plans.items():
        outcome, detail = _summarise(plan.recipe.folder, answers)
        # Of several classes with equal content, the first one is reported as built.
        repeated = outcome == "built" and plan.recipe.folder in reported
        done[fqn] = Fetched(fqn, "reused" if repeated else outcome, detail)
        reported.add(plan.recipe.folder)
    return [done[fqn] for fqn in wanted]


def _summarise(folder: str, answers: Answers) -> tuple[str, str]:
    own = [answer for (where, _), answer in answers.items() if where == folder]
    if failed := [str(answer) for answer in own if isinstance(answer, VenvError)]:
        return "failed", "\n".join(failed)
    ready = [answer for answer in own if isinstance(answer, Outcome)]
    return "built" if any(one.built for one in ready) else "reused", ready[0].python


def _provision_here(plans: Mapping[str, Plan], deadline: Deadline, status: Status) -> Answers:
    answers: Answers = {}
    for folder, plan in plans.items():
        try:
            answers[folder, HERE] = ensure_here(plan, deadline, status)
        except VenvError as error:
            answers[folder, HERE] = error
    return answers
