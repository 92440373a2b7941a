# SPDX-License-Identifier: Apache-2.0
"""Compare groups of Fairlead with verl's own groups and with Ray as one writes it by hand, in one run.

nox -s bench -- peers

Three repetitions, each with new groups of 8 workers as dp=2 x tp=4 on CPUs, one kind after the other. A figure is the
median of the repetitions, with the lowest and the highest. Each row says what its time includes.
"""

import contextlib
import importlib.metadata
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray
from _measure import Row, take_turns
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fairlead_placement import init_ray
from fairlead_workergroup import Shard, WorkerFailureError, launch

DP, TP = 2, 4
WORKERS, REPETITIONS, CALLS = DP * TP, 3, 30
KILLED, KILL_AFTER_S, SLEEP_S = 3, 1.0, 120.0
KINDS = ("by hand", "Fairlead", "verl")


class Worker:
    """The methods that the workers of all three have."""

    def nothing(self) -> None:
        return None

    def size(self, value: Any) -> int:
        return int(value.nbytes)

    def pid(self) -> int:
        return os.getpid()

    def sleep(self) -> None:
        time.sleep(SLEEP_S)

    def add_one(self, batch: Any) -> Any:
        return batch + 1


class Peer:
    """One kind of group, as its users call it. `sharded` takes and returns a whole batch."""

    def __init__(
        self, nothing: Callable[[], Any], send: Callable[[Any], Any], sharded: Callable[[Any], Any],
        sleep: Callable[[], Any], pids: list[int],
    ) -> None:  # fmt: skip
        self.nothing, self.send, self.sharded, self.sleep, self.pids = nothing, send, sharded, sleep, pids


@contextlib.contextmanager
def start_by_hand() -> Iterator[Peer]:
    """Start actors in a placement group of their own."""
    import torch

    group = placement_group([{"CPU": 1}] * WORKERS)
    ray.get(group.ready())
    strategies = [PlacementGroupSchedulingStrategy(group, rank) for rank in range(WORKERS)]
    actors: list[Any] = [ray.remote(Worker).options(num_cpus=1, scheduling_strategy=one).remote() for one in strategies]

    def nothing() -> None:
        ray.get([actor.nothing.remote() for actor in actors])

    def send(value: Any) -> None:
        reference = ray.put(value)
        ray.get([actor.size.remote(reference) for actor in actors])

    def sharded(batch: Any) -> Any:
        pieces = [ray.put(piece.clone()) for piece in batch.chunk(DP)]
        results = [actor.add_one.remote(pieces[rank // TP]) for rank, actor in enumerate(actors)]
        return torch.cat(ray.get(results[::TP]))

    def sleep() -> None:
        ray.get([actor.sleep.remote() for actor in actors])

    yield Peer(nothing, send, sharded, sleep, ray.get([actor.pid.remote() for actor in actors]))
    for actor in actors:
        ray.kill(actor)
    remove_placement_group(group)


@contextlib.contextmanager
def start_fairlead() -> Iterator[Peer]:
    """Start a group of Fairlead."""
    import torch

    with launch(Worker, dp=DP, tp=TP) as group:

        def nothing() -> None:
            group.call("nothing").result()

        def send(value: Any) -> None:
            group.call("size", value).result()

        def sharded(batch: Any) -> Any:
            pieces = [piece.clone() for piece in batch.chunk(DP)]
            return torch.cat(group.call("add_one", Shard(pieces, "dp"), collect="dp").result())

        def sleep() -> None:
            group.call("sleep").result()

        yield Peer(nothing, send, sharded, sleep, group.call("pid").result())


@contextlib.contextmanager
def start_verl() -> Iterator[Peer]:
    """Start verl's own group, with its dispatch over a mesh for batches."""
    from verl import DataProto
    from verl.single_controller.base import Worker as VerlWorker
    from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    class Registered(VerlWorker):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._register_dispatch_collect_info("mesh", dp_rank=self.rank // TP, is_collect=self.rank % TP == 0)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
        def nothing(self) -> None:
            return None

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
        def size(self, value: Any) -> int:
            return int(value.nbytes)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
        def pid(self) -> int:
            return os.getpid()

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
        def sleep(self) -> None:
            time.sleep(SLEEP_S)

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="mesh"))  # type: ignore[untyped-decorator]
        def add_one(self, data: Any) -> Any:
            return DataProto.from_dict(tensors={"batch": data.batch["batch"] + 1})

    pool = RayResourcePool([WORKERS], use_gpu=False, max_colocate_count=1)
    described = RayClassWithInitArgs(cls=ray.remote(Registered))
    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=described, device_name="cpu")

    def sharded(batch: Any) -> Any:
        return group.add_one(DataProto.from_dict(tensors={"batch": batch})).batch["batch"]

    yield Peer(group.nothing, group.size, sharded, group.sleep, group.pid())
    for actor in group.workers:
        ray.kill(actor)
    for one in pool.pgs:
        remove_placement_group(one)


STARTS = dict(zip(KINDS, (start_by_hand, start_fairlead, start_verl), strict=True))


def kill_during_call(peer: Peer) -> tuple[float, str]:
    """Kill a worker during a call; return the seconds until the caller gets an error, and what it gets."""
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.perf_counter())
        os.kill(peer.pids[KILLED], signal.SIGKILL)

    timer = threading.Timer(KILL_AFTER_S, kill)
    timer.start()
    try:
        peer.sleep()
    except (ray.exceptions.RayError, WorkerFailureError) as error:
        names = f"rank {KILLED}" in str(error)
        return time.perf_counter() - killed[0], f"{type(error).__name__}{'' if names else ', without the rank'}"
    raise AssertionError("the call returned although a worker was killed")


def repeat() -> dict[str, dict[str, Any]]:
    """Return what one repetition measures of each kind: seconds by row, and the error of a killed worker."""
    import numpy as np
    import torch

    value, batch = np.ones(4_000_000), torch.ones(2048, 1024)  # 32 MB, and 8 MiB
    measured: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    with contextlib.ExitStack() as groups:
        peers = {}
        for kind, start in STARTS.items():
            began = time.perf_counter()
            peers[kind] = groups.enter_context(start())
            peers[kind].nothing()
            measured[kind]["start"] = time.perf_counter() - began
        for kind, peer in peers.items():
            if not bool((peer.sharded(batch) == 2).all()):
                raise AssertionError(f"{kind}: wrong results")
        rows: dict[str, Callable[[Peer], Callable[[], Any]]] = {
            "empty": lambda peer: peer.nothing,
            "send": lambda peer: lambda: peer.send(value),
            "sharded": lambda peer: lambda: peer.sharded(batch),
        }
        for row, make in rows.items():
            turns = take_turns(*(make(peer) for peer in peers.values()), repeats=CALLS, settles=True)
            for kind, seconds in zip(KINDS, turns, strict=True):
                measured[kind][row] = statistics.median(seconds)
        for kind, peer in peers.items():
            measured[kind]["death"], measured[kind]["error"] = kill_during_call(peer)
    return measured


TEXTS = {
    "start": f"start of {WORKERS} workers, up to the result of a first empty call; verl's workers import verl",
    "empty": "an empty call to all workers, with its results",
    "send": "32 MB to all workers, which drop it; by hand with one ray.put",
    "sharded": f"8 MiB of torch tensors sharded over dp={DP} x tp={TP}, the results of tp=0 gathered and joined",
    "death": "a worker killed in a call: from the signal to the caller's error",
}


def rows() -> Iterator[Row]:
    """Return the rows of all three kinds, with the ratio to Fairlead."""
    os.environ["FAIRLEAD_VERL"] = "0"  # verl's own groups, where fairlead-verl is installed too
    init_ray(address="local", num_cpus=4 * WORKERS)
    try:
        runs = [repeat() for _ in range(REPETITIONS)]
    finally:
        ray.shutdown()
    for row, text in TEXTS.items():
        medians = {kind: statistics.median(run[kind][row] for run in runs) for kind in KINDS}
        yield Row(text, "", "", True)
        for kind in KINDS:
            seconds = [run[kind][row] for run in runs]
            unit, factor = ("s", 1.0) if medians[kind] >= 1 else ("ms", 1e3)
            low, median, high = (f"{one * factor:.3g}" for one in (min(seconds), medians[kind], max(seconds)))
            error = f", {' or '.join(sorted({run[kind]['error'] for run in runs}))}" if row == "death" else ""
            ratio = medians[kind] / medians["Fairlead"]
            beside = "" if kind == "Fairlead" else f", {ratio:.2f}x Fairlead's{': faster' if ratio < 0.95 else ''}"
            yield Row(f"  {kind}", f"{median} {unit} ({low} to {high}){beside}{error}", "", True)


def describe() -> str:
    """Return the versions of what is compared."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("verl", "torch", "fairlead-workergroup"))
