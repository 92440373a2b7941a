# SPDX-License-Identifier: Apache-2.0
"""Jobs that hang on purpose, and healthy ones, as programs that know nothing of Fairlead: `python jobs.py CASE`.

Each attaches to the Ray of RAY_ADDRESS, prints its job id once it stands where it should, and ends with its input.
"""

import asyncio
import contextlib
import ctypes
import json
import multiprocessing
import os
import pickle
import queue
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import ray

SIZE = 4
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def free_port():
    """Return a port that nobody uses. The system and Ray give others to the processes that start next."""
    while True:
        port = random.randrange(20000, 30000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


class Rank:
    """A rank of a training that is hand-written. Its variables are set at run time."""

    def __init__(self, rank, size, port):
        self.rank = rank
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))

    def pid(self):
        return os.getpid()

    def load(self):
        """Import what takes seconds on a busy machine."""
        import torch.distributed

        return torch.distributed.is_available()

    def join(self):
        import torch.distributed as dist

        dist.init_process_group("gloo")

    def reduce(self, times=1):
        import torch
        import torch.distributed as dist

        for _ in range(times):
            dist.all_reduce(torch.ones(1))

    def record(self, prefix, count, after_s, after_files=()):
        """Write what torch's flight recorder has, as NCCL's watchdog does a time after the last of some collectives.

        Some files must exist first: on a busy machine, other ranks may begin their last collective much later.
        """
        from torch._C._distributed_c10d import _dump_fr_trace

        def stands(found):
            entries = pickle.loads(found)["entries"]
            return len(entries) == count and time.time() - entries[-1]["time_created_ns"] / 1e9 >= after_s

        def dump():
            found = b""
            while not found or not stands(found) or not all(map(os.path.exists, after_files)):
                time.sleep(0.2)
                found = _dump_fr_trace(includeCollectives=True, includeStackTraces=False, onlyActive=False)
            with open(f"{prefix}{self.rank}", "wb") as file:
                file.write(found)

        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = prefix
        threading.Thread(target=dump, daemon=True).start()

    def train(self, how, odd):
        """Reduce once together, then hang in one rank while the others reduce again."""
        self.reduce()
        if self.rank == odd:
            HANGS[how]()
        else:
            self.reduce()

    def slow(self, turns):
        """Reduce again and again; in each turn another rank computes for longer."""
        for turn in range(turns):
            if turn % 4 == self.rank:
                compute(0.7)
            self.reduce()

    def stage(self, seconds):
        if self.rank == 0:
            compute(seconds)
        self.reduce()

    def exit(self):
        ctypes.CDLL(None)._exit(7)


def compute(seconds):
    until = time.monotonic() + seconds
    total = 0
    while time.monotonic() < until:
        for number in range(1000):
            total += number * number
        total %= 7
    return total


def in_queue():
    return queue.Queue().get()


def in_file():
    path = f"/tmp/fairlead-fifo-{os.getpid()}"
    os.mkfifo(path)
    threading.Timer(1.0, os.unlink, [path]).start()
    with open(path) as file:
        return file.read()


def in_socket():
    left, right = socket.socketpair()
    return left.recv(1), right


def in_loop():
    while True:
        pass


def in_sleep():
    time.sleep(3600)


def in_native():
    read, _ = os.pipe()
    ctypes.PyDLL(None).read(read, ctypes.create_string_buffer(1), 1)  # holds the GIL


def swallowed():
    try:
        raise ValueError("a bad batch")
    except ValueError:
        return


def other_collective():
    import torch.distributed as dist

    dist.barrier()


def in_device():
    comm = ctypes.CDLL(None)
    comm.pause()  # as native code that waits for a device


def inversion():
    first, second = threading.Lock(), threading.Lock()

    def take(one, two, both):
        with one:
            both.wait()
            with two:
                pass

    both = threading.Barrier(2)
    threading.Thread(target=take, args=(second, first, both), daemon=True).start()
    take(first, second, both)


def lock_of_dead_thread():
    lock = threading.Lock()
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    thread.join()
    with lock:
        pass


def lock_of_killed_child():
    context = multiprocessing.get_context("fork")
    lock, taken = context.Lock(), context.Event()

    def take():
        lock.acquire()
        taken.set()
        time.sleep(3600)

    child = context.Process(target=take)
    child.start()
    taken.wait()
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    lock.acquire()


HANGS = {
    one.__name__: one
    for one in (
        in_queue,
        in_file,
        in_socket,
        in_loop,
        in_sleep,
        in_native,
        swallowed,
        other_collective,
        in_device,
        inversion,
        lock_of_dead_thread,
        lock_of_killed_child,
    )
}


def make_ranks(size=SIZE, join=True):
    port = free_port()
    ranks = [Trainer.remote(rank, size, port) for rank in range(size)]
    if join:
        ray.get([one.join.remote() for one in ranks])
    return ranks


def make_stages(count):
    stages = [Stage.remote() for _ in range(count)]
    ray.get([one.quick.remote() for one in stages])
    return stages


class GivenRank(Rank):
    """A rank whose variables its process was started with."""

    def __init__(self):
        self.rank = int(os.environ["RANK"])


@ray.remote(num_cpus=0)
class Trainer(Rank):
    """Most ranks."""


@ray.remote(num_cpus=0)
class Rollout(Rank):
    """Ranks of another class in the world of the trainers."""


@ray.remote(num_cpus=0)
class Stage:
    """An actor without a rank."""

    def hang(self):
        return in_queue()

    def ask(self, others):
        return ray.get(others[0].ask.remote(others[1:]) if others[1:] else others[0].hang.remote())

    def first(self, me, other):
        return ray.get(other.second.remote(me))

    def second(self, first):
        return ray.get(first.quick.remote())

    def quick(self):
        return 1

    def work(self, seconds):
        return compute(seconds)

    def stream(self):
        number = 0
        while True:
            yield number
            number += 1

    def build(self):
        return subprocess.run([sys.executable, "-c", "while True: pass"], check=True)


@ray.remote(num_cpus=0)
class Service:
    """An actor whose methods are coroutines."""

    async def run(self, other):
        return await other.hang.remote()

    async def serve(self):
        while True:
            await asyncio.sleep(0.5)


def wait_in_get(refs, files=()):
    """Wait in `ray.get` on the main thread, and say so on another one once some files are there."""
    threading.Thread(target=report, args=(files,), daemon=True).start()
    ray.get(refs)


def report(files=()):
    while not all(map(os.path.exists, files)):
        time.sleep(0.1)
    time.sleep(SETTLE_S)
    job = ray.get_runtime_context().get_job_id()
    sys.stdout.write(json.dumps({"job": job, "driver": os.getpid()}) + "\n")
    sys.stdout.flush()


def hang(how, odd=2):
    ranks = make_ranks()
    wait_in_get([one.train.remote(how, odd) for one in ranks])


for _how in HANGS:
    CASES[_how] = lambda how=_how: hang(how)


@case
def skipped():
    """One rank has skipped a collective and waits for its device, which only the flight recorder shows."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = make_ranks()
        others = [f"{folder}/rank_{rank}" for rank in range(SIZE) if rank != 2]
        ray.get(ranks[2].record.remote(f"{folder}/rank_", 1, 5.0, others))
        ray.get([ranks[rank].record.remote(f"{folder}/rank_", 2, 5.0) for rank in range(SIZE) if rank != 2])
        refs = [one.train.remote("in_device", 2) for one in ranks]
        wait_in_get(refs, [f"{folder}/rank_{rank}" for rank in range(SIZE)])


def hang_like(class_name, name=None, odd=2):
    """Hang one rank of actors with the class, the names and the variables of a framework."""
    port = free_port()
    actor_class = ray.remote(num_cpus=0)(type(class_name, (GivenRank if name else Rank,), {}))
    ranks = []
    for rank in range(SIZE):
        if name is None:
            ranks.append(actor_class.remote(rank, SIZE, port))
            continue
        env = {"RANK": rank, "WORLD_SIZE": SIZE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        runtime_env = {"env_vars": {key: str(value) for key, value in env.items()}}
        ranks.append(actor_class.options(name=name.format(rank), runtime_env=runtime_env).remote())
    ray.get([one.join.remote() for one in ranks])
    wait_in_get([one.train.remote("in_queue", odd) for one in ranks])


@case
def like_verl():
    hang_like("WorkerDict", "q7wX2zWorkerDict_0:{}")


@case
def like_nemo_rl():
    hang_like("DTensorPolicyWorker", "lm_policy-0-{}")


@case
def like_slime():
    hang_like("MegatronTrainRayActor")


@case
def stopped():
    ranks = make_ranks()
    pid = ray.get(ranks[2].pid.remote())
    refs = [one.slow.remote(10_000) for one in ranks]
    time.sleep(1)
    os.kill(pid, signal.SIGSTOP)
    wait_in_get(refs)


def kill_before_join(kill):
    ranks = make_ranks(join=False)
    ray.get([one.load.remote() for one in ranks])
    pid = ray.get(ranks[2].pid.remote())
    refs = [ranks[rank].join.remote() for rank in (0, 1, 3)]
    kill(ranks[2], pid)
    wait_in_get(refs)


@case
def killed():
    kill_before_join(lambda rank, pid: os.kill(pid, signal.SIGKILL))


@case
def exits_in_native_code():
    kill_before_join(lambda rank, pid: rank.exit.remote())


@case
def dropped():
    kill_before_join(lambda rank, pid: ray.kill(rank))


@case
def two_classes():
    port = free_port()
    ranks = [(Rollout if rank > 1 else Trainer).remote(rank, SIZE, port) for rank in range(SIZE)]
    ray.get([one.join.remote() for one in ranks])
    wait_in_get([one.train.remote("in_queue", 3) for one in ranks])


@case
def two_worlds():
    healthy, hung = make_ranks(2), make_ranks(2)
    wait_in_get([one.slow.remote(10_000) for one in healthy] + [one.train.remote("in_queue", 1) for one in hung])


@case
def chain():
    a, b, c = make_stages(3)
    wait_in_get(a.ask.remote([b, c]))


@case
def wait_for_the_last():
    stages = make_stages(3)
    refs = [stages[0].quick.remote(), stages[1].hang.remote(), stages[2].quick.remote()]
    threading.Thread(target=report, daemon=True).start()
    ray.wait(refs, num_returns=3)


@case
def cycle():
    a, b = make_stages(2)
    wait_in_get(a.first.remote(a, b))


@case
def awaited():
    service, (stage,) = Service.remote(), make_stages(1)
    wait_in_get(service.run.remote(stage))


@case
def unread_generator():
    (stage,) = make_stages(1)
    stream = stage.stream.options(_generator_backpressure_num_objects=1).remote()
    wait_in_get([stage.quick.remote(), next(stream)])


@case
def pending_actor():
    wait_in_get(Stage.options(num_gpus=8).remote().quick.remote())


@case
def pending_group():
    wait_in_get(ray.util.placement_group([{"GPU": 8}]).ready())


# Healthy jobs.


@case
def slow_in_turn():
    ranks = make_ranks()
    wait_in_get([one.slow.remote(10_000) for one in ranks])


@case
def long_work():
    ranks = make_ranks()
    wait_in_get([one.stage.remote(1000) for one in ranks])


@case
def long_build():
    wait_in_get(make_stages(1)[0].build.remote())


@case
def idle():
    make_stages(3)
    threading.Thread(target=report, daemon=True).start()
    threading.Event().wait()


@case
def services():
    wait_in_get([one.serve.remote() for one in [Service.remote(), Service.remote()]])


@case
def ends():
    ranks = make_ranks()
    refs = [one.slow.remote(10_000) for one in ranks]
    time.sleep(1)
    for one in ranks[1:]:
        ray.kill(one)
    wait_in_get(Stage.remote().work.remote(1000))
    del refs


@case
def restarted():
    stages = [Stage.options(max_restarts=1, max_task_retries=1).remote() for _ in range(3)]
    pids = ray.get([one.__ray_call__.remote(lambda self: os.getpid()) for one in stages])
    os.kill(pids[1], signal.SIGKILL)
    ray.get([one.quick.remote() for one in stages])
    wait_in_get([one.work.remote(1000) for one in stages])


@case
def pipeline():
    stages = make_stages(3)
    wait_in_get([stages[0].work.remote(1000), stages[1].build.remote(), stages[2].hang.remote()])


SETTLE_S = float(os.environ.get("SETTLE_S", "3"))


def end_with_input():
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=end_with_input, daemon=True).start()
    ray.init(log_to_driver=False, logging_level="error")
    CASES[sys.argv[1]]()
