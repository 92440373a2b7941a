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

from ._arguments import PerWorker, Shard
from ._calls.call import Call
from ._calls.handle import GroupHandle, attach
from ._calls.results import MultiWorkerFuture, Outcome
from ._calls.view import GroupView
from ._context import CurrentWorker, current_worker, report_progress
from ._group import RayWorkerGroup
from ._launch import launch
from ._model import GroupState, Place, Restart
from ._options import Elastic, Timeouts
from ._replies import ResultStream
from ._start.environment import WorkerOptions, recursive_merge_options
from ._start.worker_class import RayWorkerBuilder
from ._status import StuckWorker, WorkerStatus, WorkerUsage
from .exceptions import (
    CallCancelledError,
    CallTimeoutError,
    LateWorker,
    RemoteError,
    ResizeTimeoutError,
    StaleGroupError,
    WorkerFailure,
    WorkerFailureError,
    WorkerGroupError,
    WorkerStartError,
)

__version__ = "0.1.0"

__all__ = [
    "Call",
    "CallCancelledError",
    "CallTimeoutError",
    "CurrentWorker",
    "Elastic",
    "GroupHandle",
    "GroupState",
    "GroupView",
    "LateWorker",
    "MultiWorkerFuture",
    "Outcome",
    "PerWorker",
    "Place",
    "RayWorkerBuilder",
    "RayWorkerGroup",
    "RemoteError",
    "ResizeTimeoutError",
    "Restart",
    "ResultStream",
    "StaleGroupError",
    "Shard",
    "StuckWorker",
    "Timeouts",
    "WorkerFailure",
    "WorkerFailureError",
    "WorkerGroupError",
    "WorkerOptions",
    "WorkerStartError",
    "WorkerStatus",
    "WorkerUsage",
    "attach",
    "current_worker",
    "launch",
    "recursive_merge_options",
    "report_progress",
]
