# SPDX-License-Identifier: Apache-2.0
"""The environments of many worker classes made ready at once, before they are needed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from .._build.build import ensure, found
from .._build.recipe import Outcome
from .._build.uv import Deadline
from .._local import as_spec
from .._planning.command import is_uv_command
from .._planning.plan import Plan, planned
from .._progress import Bars
from .._registry import get_actor_python_env, known_actor_environments
from ..exceptions import VenvError
from .provision import provisioned
from .rpc import alive_nodes

__all__ = ["Fetched", "prefetch"]

AT_ONCE = 4


@dataclass(frozen=True)
class Fetched:
    """What became of the environment of one class.

    Attributes:
        fqn: full name of the class.
        status: "built"; "reused", if it was there; "skipped", if there is nothing to build; "failed".
        detail: the interpreter, or what went wrong.
    """

    fqn: str
    status: str
    detail: str


def prefetch(
    classes: Sequence[str] = (), *, cluster: bool = False, timeout_s: float = 1800, progress: bool = True
) -> list[Fetched]:
    """Make the environments of worker classes ready; equal content is built once, and no failure stops the others.

    Args:
        classes: full names; by default all that are registered or in the pyproject.toml.
        cluster: on every node of the running Ray, and not on this machine alone.
        timeout_s: for everything together, in seconds.
        progress: show bars on a terminal.
    """
    deadline = Deadline(timeout_s)
    done: dict[str, Fetched] = {}
    plans: dict[str, Plan] = {}
    wanted = list(dict.fromkeys(classes)) or list(known_actor_environments())
    there = alive_nodes() if cluster else {}
    with Bars(shown=progress) as bars:
        for fqn in wanted:
            try:
                what = get_actor_python_env(fqn)
                if isinstance(what, str) and not is_uv_command(what):
                    done[fqn] = Fetched(fqn, "skipped", what)
                else:
                    plans[fqn] = planned(as_spec(what), deadline=deadline, show=bars.line("wheels"))
            except (ValueError, TypeError, VenvError) as error:
                done[fqn] = Fetched(fqn, "failed", str(error))
        distinct = {plan.recipe.folder: plan for plan in plans.values()}
        made = _on_cluster(distinct, there, deadline, bars) if cluster else _here(distinct, deadline, bars)
    told: set[str] = set()
    for fqn, plan in plans.items():
        status, detail = made[plan.recipe.folder]
        # Of several with equal content the first one has it built.
        done[fqn] = Fetched(fqn, "reused" if status == "built" and plan.recipe.folder in told else status, detail)
        told.add(plan.recipe.folder)
    return [done[fqn] for fqn in wanted]


def _summed(outcomes: Iterable[Outcome], errors: Iterable[VenvError]) -> tuple[str, str]:
    ready, failed = list(outcomes), list(errors)
    if failed:
        return "failed", "\n".join(map(str, failed))
    return "built" if any(one.built for one in ready) else "reused", ready[0].python


def _here(plans: Mapping[str, Plan], deadline: Deadline, bars: Bars) -> dict[str, tuple[str, str]]:
    def one(plan: Plan) -> tuple[str, str]:
        name = plan.recipe.folder.rpartition("/")[2]
        show: Callable[[str], None] = bars.line(name)
        try:
            ready = found(plan.recipe.folder, plan.recipe.fingerprint)
            if ready is None:
                plan.check(deadline, show)
                ready = ensure(plan.recipe, lambda: plan.files, deadline=deadline, show=show)
        except VenvError as error:
            return _summed([], [error])
        bars.update(name, 1, 1)
        return _summed([ready], [])

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(plans, pool.map(one, plans.values()), strict=True))


def _on_cluster(
    plans: Mapping[str, Plan], there: Mapping[str, str], deadline: Deadline, bars: Bars
) -> dict[str, tuple[str, str]]:
    done, errors = provisioned(plans, there, deadline, bars)
    return {
        folder: _summed(done[folder].values(), [error for (where, _), error in errors.items() if where == folder])
        for folder in plans
    }
