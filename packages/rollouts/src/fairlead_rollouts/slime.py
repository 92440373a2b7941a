# SPDX-License-Identifier: Apache-2.0
"""The data source and the rollout function of slime, with a ledger. It imports slime only when they are used."""

import atexit
import time
from typing import Any

from ._datasource import LedgerSource, iterate
from ._model import Claim, Completeness, ReadyFirst, Ref

__all__ = ["LedgerDataSource", "generate_rollout"]

POLL_S = 0.05


class LedgerDataSource(LedgerSource):
    """Give out the prompts of slime's dataset by their id, and save in each checkpoint which of them are open.

    slime makes it if `--data-source-path` is `fairlead_rollouts.slime.LedgerDataSource`, together with
    `--rollout-function-path fairlead_rollouts.slime.generate_rollout`. These options go into the file of
    `--custom-config-path`:

    - `ledger_max_staleness`: the bound K in versions; 1 by default. Generation waits if it runs ahead by more.
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

        self._worker: Any = None
        staleness, self._prefetch = getattr(args, "ledger_max_staleness", 1), getattr(args, "ledger_prefetch", 1)
        rules: dict[str, Any] = {"max_staleness": staleness, "policy": ReadyFirst(), "on_stale": "requeue"}
        attempts = Completeness(max_attempts=1 << 30, retry="group")
        super().__init__(args, RolloutDataSource(args), Sample, completeness=attempts, **rules)
        if staleness * self._interval < self._prefetch:
            raise ValueError(
                f"ledger_max_staleness is {staleness} and ledger_prefetch is {self._prefetch}: a rollout that is "
                "generated before the last one is trained is a version old. Set ledger_max_staleness to at least 1."
            )

    def find_worker(self) -> Any:
        """Return slime's worker, which asks this data source for groups. A worker that has ended is replaced."""
        from slime.rollout.fully_async_rollout import AsyncRolloutWorker
        from slime.utils.http_utils import get_rollout_num_engines

        if self._worker is None or not self._worker.worker_thread.is_alive():
            concurrency = self._args.sglang_server_concurrency * get_rollout_num_engines(self._args)
            self._worker = AsyncRolloutWorker(self._args, self, concurrency=concurrency)
            self._worker.start()
            atexit.register(self._worker.stop)
        return self._worker

    def begin(self, rollout_id: int) -> None:
        """Report that a rollout begins. slime has trained all rollouts before it, but `ledger_prefetch` of them."""
        trained = rollout_id - self._prefetch
        with self.lock:
            if trained > 0:
                self.ledger.advance(max(self.ledger.version, trained // self._interval), trained=trained)

    def take(self, rollout_id: int, groups: list[list[Any]]) -> list[list[Any]] | int:
        """Record groups that slime has collected, and claim those of a rollout.

        A group that took too long is being generated again, and its late result is left out. A group that is older than
        the bound will be generated again.

        Returns:
            All groups of the rollout, whose claim is on the disk; or the number of groups that it lacks.
        """
        with self.lock:
            for group in groups:
                lease = self.end(group)
                if lease is not None:
                    self.ledger.finish_many([(lease, sample, Ref(group)) for sample in lease.samples])
            claim = self.ledger.claim(rollout_id + 1, self._args.rollout_batch_size)
            if not isinstance(claim, Claim):
                return claim.need - claim.have
            self.save_claims()
            taken: list[list[Any]] = [group.samples[0].ref.value for group in claim.groups]
            return sorted(taken, key=lambda group: next(iterate(group)).index)


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Collect the groups of a rollout from slime's fully asynchronous worker, and record them.

    Evaluation is slime's own.

    Args:
        args: the arguments of slime.
        rollout_id: the rollout.
        data_source: a `LedgerDataSource`.
        evaluation: as in slime.
    """
    if evaluation:
        from slime.rollout import sglang_rollout

        return sglang_rollout.generate_rollout(args, rollout_id, data_source, evaluation=True)
    data_source.begin(rollout_id)
    worker, missing = data_source.find_worker(), args.rollout_batch_size
    while True:
        taken = data_source.take(rollout_id, [group for _, group in worker.get_completed_groups(limit=missing)])
        if not isinstance(taken, int):
            return taken
        missing = taken
        time.sleep(POLL_S)
