# SPDX-License-Identifier: Apache-2.0
"""Record what happens to every prompt and every rollout of an asynchronous RL job.

>>> config = LedgerConfig(group_size=2, groups_per_version=2, max_staleness=1)
>>> ledger = Ledger(config, IndexStream(1000, seed=0))
>>> ledger.room()
4
>>> for lease in ledger.lease(2):
...     for sample in lease.samples:
...         accepted = ledger.finish(lease, sample, Ref(f"rollout {sample_id(lease.prompt_id, sample)}"))
>>> claim = ledger.claim(step=1, count=2)
>>> [sample.ref.value for sample in claim.groups[1].samples]
['rollout 1-0', 'rollout 1-1']
>>> ledger.advance(1, trained=1)
>>> ledger.statistics().trained, ledger.statistics().staleness
(2, {0: 2})
"""

from ._async import AsyncLedger
from ._ledger import Ledger
from ._model import (
    Claim,
    Completeness,
    Group,
    Lease,
    LedgerConfig,
    OldestFirst,
    ReadyFirst,
    Ref,
    Sample,
    Shortage,
    sample_id,
)
from ._sources import IndexStream, PromptSource
from ._statistics import Statistics
from .exceptions import OldWeightsError, RolloutError, SnapshotError

__version__ = "0.1.0"

__all__ = [
    "AsyncLedger",
    "Claim",
    "Completeness",
    "Group",
    "IndexStream",
    "Lease",
    "Ledger",
    "LedgerConfig",
    "OldWeightsError",
    "OldestFirst",
    "PromptSource",
    "ReadyFirst",
    "Ref",
    "RolloutError",
    "Sample",
    "Shortage",
    "SnapshotError",
    "Statistics",
    "__version__",
    "sample_id",
]
