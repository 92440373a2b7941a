# SPDX-License-Identifier: Apache-2.0
"""The data source and the rollout function of slime, with a ledger. It imports slime only when they are used."""

import copy
from typing import Any

from ._datasource import LedgerSource, iterate
from ._model import Claim, Ref
from ._policies import ReadyFirst

__all__ = ["LedgerDataSource", "generate_rollout"]


class LedgerDataSource(LedgerSource):
    """Give out the prompts of slime's dataset by their id, and save in each checkpoint which of them are open.

    slime makes it if `--data-source-path` is `fairlead_rollouts.slime.LedgerDataSource`, together with
    `--rollout-function-path fairlead_rollouts.slime.generate_rollout`. These options go into the file of
    `--custom-config-path`:

    - `ledger_max_staleness`: generation waits if it runs ahead by more versions; 1 by default.
    - `ledger_deadline_s`: a group that does not return within so many seconds is generated again; 3600 by default.
    - `ledger_prefetch`: 1 by default, for `train_async.py`, which generates a rollout before the last one is trained;
      0 for `train.py`.
    - `ledger_missing`: what to do if a checkpoint has no snapshot, as in a run that began without a ledger: "restart"
      begins at prompt 0, "epoch" at the next epoch. By default it is an error.

    Args:
        args: the arguments of slime.
    """

    def __init__(self, args: Any) -> None:
        from slime.rollout.data_source import RolloutDataSource
        from slime.utils.types import Sample

        if hasattr(args, "ledger_rollout_function"):
            raise ValueError(
                "ledger_rollout_function is set, and only slime's fully asynchronous rollout function can be used: "
                "others do not return the groups that they leave out. Remove the option."
            )
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

    def take(self, groups: list[list[Any]]) -> list[list[Any]]:
        """Record groups that slime has collected.

        Returns:
            Those that count. A group that took too long is being generated again, and its late result is left out.
        """
        with self.lock:
            return [group for group in groups if self._finish(group)]

    def _finish(self, group: list[Any]) -> bool:
        lease = self.end(group)
        if lease is None:
            return False
        return all(self.ledger.finish_many([(lease, sample, Ref(lease.prompt_id)) for sample in lease.samples]))

    def claim(self, rollout_id: int, count: int) -> None:
        """Record that a rollout has the groups that were taken, and return when this is on the disk."""
        with self.lock:
            claim = self.ledger.claim(rollout_id + 1, count)
            if not isinstance(claim, Claim):
                raise RuntimeError(f"Rollout {rollout_id} with {count} groups cannot be claimed: {claim}.")
            self.save_claims()


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Call slime's fully asynchronous rollout function, and record what it returns.

    It is called again for the places of groups that came too late. Evaluation is slime's own.

    Args:
        args: the arguments of slime.
        rollout_id: the rollout.
        data_source: a `LedgerDataSource`.
        evaluation: as in slime.
    """
    if evaluation:
        from slime.rollout import sglang_rollout

        return sglang_rollout.generate_rollout(args, rollout_id, data_source, evaluation=True)
    from slime.rollout import fully_async_rollout

    data_source.begin(rollout_id)
    groups: list[list[Any]] = []
    given = args
    while len(groups) < args.rollout_batch_size:
        groups += data_source.take(fully_async_rollout.generate_rollout_fully_async(given, rollout_id, data_source))
        given = copy.copy(args)
        given.rollout_batch_size = args.rollout_batch_size - len(groups)
    data_source.claim(rollout_id, len(groups))
    return sorted(groups, key=lambda group: next(iterate(group)).index)
