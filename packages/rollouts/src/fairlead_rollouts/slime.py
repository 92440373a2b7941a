# SPDX-License-Identifier: Apache-2.0
"""The data source and the rollout function of slime, with a ledger. It imports slime only when they are used."""

from typing import Any

from ._datasource import LedgerSource
from ._model import Claim, Ref
from ._policies import ReadyFirst

__all__ = ["LedgerDataSource", "generate_rollout"]


class LedgerDataSource(LedgerSource):
    """Give out the prompts of slime's dataset by ordinal, and save in each checkpoint which of them are open.

    slime makes it if `--data-source-path` is `fairlead_rollouts.slime.LedgerDataSource`, together with
    `--rollout-function-path fairlead_rollouts.slime.generate_rollout`. Generation waits if it runs ahead by more than
    `ledger_max_staleness` versions, which is 1 unless `--custom-config-path` sets it. A group that does not return
    within `ledger_deadline_s` seconds, by default 3600, is generated again. `ledger_prefetch` is 1 by default, for
    `train_async.py`, which generates a rollout before the last one is trained; set it to 0 for `train.py`.

    Args:
        args: the arguments of slime.
    """

    def __init__(self, args: Any) -> None:
        from slime.rollout.data_source import RolloutDataSource
        from slime.utils.types import Sample

        staleness, self._prefetch = getattr(args, "ledger_max_staleness", 1), getattr(args, "ledger_prefetch", 1)
        rules: dict[str, Any] = {"max_staleness": None, "lookahead": staleness, "policy": ReadyFirst()}
        super().__init__(args, RolloutDataSource(args), Sample, on_stale="drop", **rules)
        if staleness * self._interval < self._prefetch:
            raise ValueError(
                f"ledger_max_staleness is {staleness} and ledger_prefetch is {self._prefetch}: a rollout that is "
                "generated before the last one is trained is a version old. Set ledger_max_staleness to at least 1."
            )

    def begin(self, rollout_id: int) -> None:
        """Report that a rollout begins. slime has trained all rollouts before it, but `ledger_prefetch` of them."""
        trained = rollout_id - self._prefetch
        with self.lock:
            if trained > 0:
                self.ledger.advance(max(self.ledger.version, trained // self._interval), trained=trained)

    def take(self, rollout_id: int, groups: list[list[Any]]) -> None:
        """Record the groups of a rollout, which slime has chosen: they are finished and claimed in one step.

        Raises:
            RuntimeError: A group was not given out, or its lease has expired, so it is generated a second time.
        """
        with self.lock:
            for group in groups:
                lease = self._leases.pop(group[0].group_index, None)
                accepted = lease is not None and self.ledger.seal_many(
                    [(lease, sibling, Ref(group[0].group_index)) for sibling in lease.siblings]
                )
                if not accepted or not all(accepted):
                    raise RuntimeError(
                        f"Rollout {rollout_id} has group {group[0].group_index}, which is generated again because it "
                        "took too long. Raise ledger_deadline_s."
                    )
            claim = self.ledger.claim(rollout_id + 1, len(groups))
            if not isinstance(claim, Claim):
                raise RuntimeError(f"Rollout {rollout_id} with {len(groups)} groups cannot be claimed: {claim}.")


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Call slime's fully asynchronous rollout function, and record what it returns.

    The argument `ledger_rollout_function` of slime may name another function with this signature.

    Args:
        args: the arguments of slime.
        rollout_id: the rollout.
        data_source: a `LedgerDataSource`.
        evaluation: as in slime.
    """
    from slime.utils.misc import load_function

    path = getattr(args, "ledger_rollout_function", "slime.rollout.fully_async_rollout.generate_rollout_fully_async")
    if not evaluation:
        data_source.begin(rollout_id)
    result = load_function(path)(args, rollout_id, data_source, evaluation=evaluation)
    if not evaluation:
        data_source.take(rollout_id, getattr(result, "samples", result))
    return result
