# SPDX-License-Identifier: Apache-2.0
"""Groups of Ray workers, called by rank or along named axes.

>>> from fairlead_placement import RayVirtualCluster, init_ray
>>> from fairlead_sharding import NamedSharding
>>> from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, Shard
>>> _ = init_ray(address="local", num_cpus=4)
>>> axes = NamedSharding.from_shape(dp=2, tp=2)
>>> cluster = RayVirtualCluster([4], use_gpus=False)
>>> with cluster, RayWorkerGroup(cluster, RayWorkerBuilder("collections.Counter"), sharding_annotations=axes) as group:
...     _ = group.call("update", Shard(["aab", "c"], "dp"), discard=True).result()
...     group.call("total", collect="dp").result()
[3, 1]
>>> import ray
>>> ray.shutdown()
"""

from ._awaiting import ResultStream
from ._builder import RayWorkerBuilder
from ._call import Call
from ._current import CurrentWorker, current_worker, report_progress
from ._explain import CallExplanation
from ._group import RayWorkerGroup
from ._marks import PerWorker, Shard
from ._options import recursive_merge_options
from ._outcome import CallStatistics, Outcome
from ._results import MultiWorkerFuture
from ._statistics import GroupStatistics
from ._status import StuckWorker, WorkerEvent, WorkerStatus, WorkerUsage
from ._view import GroupView
from ._watch import Watch
from .exceptions import (
    CallCancelledError,
    CallTimeoutError,
    LateWorker,
    RemoteError,
    WorkerFailure,
    WorkerFailureError,
    WorkerGroupError,
    WorkerStartError,
)

__version__ = "0.1.0"

__all__ = [
    "Call",
    "CallCancelledError",
    "CallExplanation",
    "CallStatistics",
    "CallTimeoutError",
    "CurrentWorker",
    "GroupStatistics",
    "GroupView",
    "LateWorker",
    "MultiWorkerFuture",
    "Outcome",
    "PerWorker",
    "RayWorkerBuilder",
    "RayWorkerGroup",
    "RemoteError",
    "ResultStream",
    "Shard",
    "StuckWorker",
    "Watch",
    "WorkerEvent",
    "WorkerFailure",
    "WorkerFailureError",
    "WorkerGroupError",
    "WorkerStartError",
    "WorkerStatus",
    "WorkerUsage",
    "current_worker",
    "recursive_merge_options",
    "report_progress",
]
