# SPDX-License-Identifier: Apache-2.0
"""What Ray's libraries and those for training look like from outside: their threads, actors, collectives and waits.

A file is recognised by its folder in site-packages, so that a checkout that is called "torch" is code of the job.
"""

import re

from ..model import Actor, Frame

PACKAGES = re.compile(r"/(?:site|dist)-packages/")
_STANDARD = re.compile(r"/lib/python3\.\d+/(?!site-packages/|dist-packages/)|^<frozen|/python3\d+\.zip/")
_RAY = re.compile(r"-packages/ray/|(?:^|/)ray/_raylet")

# Calls in which a rank waits for the other ones. `torch/distributed` is also checkpoints, DTensor and RPC: code.
_COLLECTIVE = re.compile(
    r"-packages/(?:torch/distributed/(?:distributed_c10d|rendezvous|_functional_collectives|nn/functional)\.py"
    r"|ray/util/collective/|ray/train/(?:v2/)?collective/|mpi4py/|jax/_src/(?:distributed|multihost)"
    r"|jax/experimental/multihost_utils|deepspeed/comm/|horovod/)"
    # `ray.train.report` is one too.
    r"|-packages/ray/train/v2/.* \S*(?:_sync_checkpoint_dir_name|broadcast_from_rank_zero|barrier)"
)
_RENDEZVOUS = re.compile(r"/torch/distributed/.*(?:rendezvous|init_process_group|_store_based_barrier)|init_collective")
# Native code of these waits for devices and for other ranks without a frame of its own.
_DEVICE = re.compile(
    r"-packages/(?:torch/(?!utils/data/|distributed/checkpoint/|serialization)|jax/|jaxlib/|cupy/|tensorflow/"
    r"|nccl/|deepspeed/|vllm/|sglang/|xgboost/|lightgbm/)"
)
# DDP and FSDP reduce gradients inside of it.
_BACKWARD = "_engine_run_backward"
# Where actors of a compiled graph wait for each other.
_CHANNEL = re.compile(r"-packages/ray/(?:experimental/channel/|dag/)")

# A coroutine that awaits something has no stack.
_SUSPENDS = re.compile(
    r"/ray/_private/object_ref_generator\.py$|/ray/_raylet|/lib/python3\.\d+/asyncio/|-packages/uvloop/"
)
# A server that waits for a request waits for somebody that nothing here can see.
_SERVER = re.compile(r"^(?:accept|serve_forever|_accept_connection)$|-packages/(?:zmq|grpc|uvicorn)/")

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
# Code in which a worker waits for a process that it has started.
_CHILDREN = re.compile(
    r"/multiprocessing/|/subprocess\.py$|/torch/utils/data/|/concurrent/futures/process|/joblib/|/loky/|/gymnasium/vector/"
)


def last_name(function: str) -> str:
    """Return the name of a function without its class."""
    return function.rpartition(".")[2]


def is_ray(frame: Frame) -> bool:
    """Return whether a frame is of Ray or of one of its libraries."""
    return _RAY.search(frame.file) is not None


def is_library(frame: Frame) -> bool:
    """Return whether a frame is of Ray or of the standard library, which is not shown where code of the job stands."""
    return is_ray(frame) or _STANDARD.search(frame.file) is not None


def is_own(frame: Frame) -> bool:
    """Return whether a frame is of the job: neither Python's, nor Ray's, nor of a library that waits inside."""
    return not (is_library(frame) or is_collective(frame) or _DEVICE.search(frame.file))


def is_collective(frame: Frame) -> bool:
    """Return whether a frame is of a function in which ranks wait for each other."""
    return _COLLECTIVE.search(f"{frame.file} {frame.function}") is not None


def is_rendezvous(frame: Frame) -> bool:
    """Return whether a frame waits for the other ranks to join."""
    return _RENDEZVOUS.search(f"{frame.file} {frame.function}") is not None


def is_device(frame: Frame) -> bool:
    """Return whether a frame is of a library whose native code may wait for a device or for another rank."""
    return _DEVICE.search(frame.file) is not None


def is_backward(frame: Frame) -> bool:
    """Return whether a frame computes gradients, in which distributed models reduce them."""
    return last_name(frame.function) == _BACKWARD


def is_channel(frame: Frame) -> bool:
    """Return whether a frame waits in a compiled graph of Ray."""
    return _CHANNEL.search(frame.file) is not None


def is_server(frame: Frame) -> bool:
    """Return whether a frame waits for a request from outside, or is a coroutine's loop, which shows no position."""
    if not (is_library(frame) or PACKAGES.search(frame.file)):
        return False
    return bool(_SUSPENDS.search(frame.file) or _SERVER.search(frame.file) or _SERVER.search(last_name(frame.function)))


def waits_for_child(frame: Frame) -> bool:
    """Return whether a frame may wait for a process that its own one has started."""
    return _CHILDREN.search(frame.file) is not None


def starts_child(frame: Frame) -> bool:
    """Return whether a frame is the one in which a process of `multiprocessing` begins."""
    return frame.file.endswith("/multiprocessing/process.py")


def is_replica(actor: Actor) -> bool:
    """Return whether an actor is a replica of Serve, whose requests to others leave no trace in Ray's tables."""
    return actor.class_name.startswith("ServeReplica")


def is_infrastructure(actor: Actor) -> bool:
    """Return whether an actor is of a library and runs no code of the job, such as the controller of Ray Train."""
    return bool(_INFRASTRUCTURE.search(actor.module)) and not _USER_ACTORS.search(actor.class_name)
