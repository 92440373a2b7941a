# SPDX-License-Identifier: Apache-2.0
"""What Ray's libraries and those for training look like from outside: their threads, actors, collectives and waits.

A file is recognised by its folder in site-packages, so that a checkout that is called "torch" is code of the job.
Those of Fairlead are also in its own checkout.
"""

import re

from ..model import Actor, Frame

PACKAGES = re.compile(r"/(?:site|dist)-packages/|/packages/[\w-]+/src/fairlead_\w+/")
_STANDARD = re.compile(r"/lib/python3\.\d+/(?!site-packages/|dist-packages/)|^<frozen|/python3\d+\.zip/")
RAY = re.compile(r"-packages/ray/|(?:^|/)ray/_raylet")

# `ray.train.report` waits for all ranks.
REPORT = re.compile(r"-packages/ray/train/v2/.* \S*(?:_sync_checkpoint_dir_name|broadcast_from_rank_zero|barrier)")
# Calls in which a rank waits for the other ones. `torch/distributed` is also checkpoints, DTensor and RPC: code.
COLLECTIVE = re.compile(
    r"-packages/(?:torch/distributed/(?:distributed_c10d|rendezvous|_functional_collectives|nn/functional)\.py"
    r"|ray/util/collective/|ray/train/(?:v2/)?collective/|mpi4py/|jax/_src/(?:distributed|multihost)"
    r"|jax/experimental/multihost_utils|deepspeed/comm/|horovod/)"
    rf"|{REPORT.pattern}"
)
RENDEZVOUS = re.compile(r"/torch/distributed/.*(?:rendezvous|init_process_group|_store_based_barrier)|init_collective")
# Native code of these waits for devices and for other ranks without a frame of its own.
DEVICE = re.compile(
    r"-packages/(?:torch/(?!utils/data/|distributed/checkpoint/|serialization)|jax/|jaxlib/|cupy/|tensorflow/"
    r"|nccl/|deepspeed/|vllm/|sglang/|xgboost/|lightgbm/)"
)
# DDP and FSDP reduce gradients inside of it.
BACKWARD = re.compile(r"[ .]_engine_run_backward$")
# Libraries for trees do so with histograms.
BOOST = re.compile(r"-packages/(?:xgboost|lightgbm)/.* Booster\.update$")
# Where actors of a compiled graph wait for each other.
CHANNEL = re.compile(r"-packages/ray/(?:experimental/channel/|dag/)")

# With what functions of Python wait for another thread.
CONDITION = re.compile(r"/threading\.py (?:Condition\.)?wait$")

# Where a breakpoint waits until somebody attaches a debugger: Ray's own, and debugpy.
BREAKPOINT = re.compile(r"-packages/(?:ray/util/rpdb\.py \S*listen|debugpy/.* wait_for_client)$")

# A coroutine that awaits something has no stack, and a server waits for somebody that nothing here can see.
_SERVER = re.compile(
    r"/ray/_private/object_ref_generator\.py |/ray/_raylet|/lib/python3\.\d+/asyncio/|-packages/uvloop/"
    r"|-packages/(?:zmq|grpc|uvicorn)/|[ .](?:accept|serve_forever|_accept_connection)$"
)

# The threads on which libraries run code of the job, by file and function, as seen in Ray 2.60: Ray Train v2, Ray Train
# v1 and Tune, and the methods of Serve that are no coroutines.
USER_THREADS = re.compile(
    r"/ray/train/v2/_internal/execution/worker_group/thread_runner\.py .*_run_target$"
    r"|/ray/air/_internal/util\.py RunnerThread\.run$"
    r"|/ray/data/_internal/execution/util\.py .*_SingleThreadedWrapper"
)
# The actors of Ray's libraries that run code of the job; others of the same modules are infrastructure.
_USER_ACTORS = re.compile(
    r"^(?:RayTrainWorker|_?MapWorker|ReplicaActor|ServeReplica|PoolActor|ImplicitFunc|Lambda|_Remote\w+Env|RolloutWorker)"
    r"|EnvRunner|Learner|Trainable|Algorithm|_Inner|Aggregator"
)
_INFRASTRUCTURE = re.compile(r"^(?:ray|fairlead_placement|fairlead_venvs)\.")


def shows(pattern: re.Pattern[str], *frames: Frame) -> bool:
    """Return whether the file and the function of one of some frames, with a blank between them, match a pattern."""
    return any(pattern.search(f"{frame.file} {frame.function}") for frame in frames)


def last_name(function: str) -> str:
    """Return the name of a function without its class."""
    return function.rpartition(".")[2]


def is_library(frame: Frame) -> bool:
    """Return whether a frame is of Ray or of the standard library, which is not shown where code of the job stands."""
    return shows(RAY, frame) or shows(_STANDARD, frame)


def is_own(frame: Frame) -> bool:
    """Return whether a frame is of the job: neither Python's, nor Ray's, nor of a library that waits inside."""
    return not (is_library(frame) or shows(COLLECTIVE, frame) or shows(DEVICE, frame))


def is_server(frame: Frame) -> bool:
    """Return whether a frame waits for a request from outside, or is a coroutine's loop, which shows no position."""
    return (is_library(frame) or shows(PACKAGES, frame)) and shows(_SERVER, frame)


def is_infrastructure(actor: Actor) -> bool:
    """Return whether an actor is of a library and runs no code of the job, such as the controller of Ray Train."""
    return bool(_INFRASTRUCTURE.search(actor.module)) and not _USER_ACTORS.search(actor.class_name)
