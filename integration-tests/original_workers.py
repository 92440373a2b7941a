# SPDX-License-Identifier: Apache-2.0
"""The classes and functions of `test_original_calls.py` that run on workers and hosts, which import this module."""

import asyncio
import os
import time
from pathlib import Path

import ray


class Trainer:
    """Returns its arguments, its environment and itself, and waits, fails or dies on request."""

    def __init__(self, scale=1, folder=None):
        self.scale, self.folder = scale, folder

    def echo(self, *args, **kwargs):
        return args, kwargs

    def give(self, data, scale=1):
        return None if data is None else data * scale * self.scale

    def rank(self):
        return int(os.environ["RANK"])

    def read(self, names):
        return [os.environ.get(name) for name in names]

    def items(self, count):
        for number in range(count):
            yield 10 * self.rank() + number

    def step(self, number):
        from fairlead_workergroup import report_progress

        report_progress(number, "a step")

    def wait_for(self, gate):
        while not os.path.exists(gate):
            time.sleep(0.01)

    def fail(self):
        raise LookupError("mine")

    def die(self):
        os._exit(1)

    def grow(self, size):
        self.memory = bytearray(b"x") * size
        time.sleep(600)

    def save(self):
        Path(self.folder, f"saved-{self.rank()}").touch()

    def compression(self):
        from fairlead_workergroup import current_worker

        return current_worker().gradient_compression, current_worker().communication_backend


class Meeting:
    """Its methods overlap only if the worker has one event loop for all of them."""

    def __init__(self):
        self.arrived = asyncio.Event()

    async def wait(self):
        await self.arrived.wait()
        return "met"

    async def arrive(self):
        self.arrived.set()


@ray.remote(runtime_env={"env_vars": {"OF_CLASS": "class", "OF_GROUP": "class"}})
class Engine:
    """Decides by itself what it needs, as an inference engine of the original system does."""

    def __init__(self, model, bundle_indices=None, seed=None):
        self.made_with = model, bundle_indices, seed

    @staticmethod
    def configure_worker(num_gpus, bundle_indices=None, num_gpus_per_node=None):
        init_kwargs = {"seed": 0} if bundle_indices is None else {"seed": 1, "bundle_indices": bundle_indices}
        env_vars = {"ASKED": f"{num_gpus} {num_gpus_per_node}"}
        return {"num_gpus": num_gpus / 2}, env_vars, init_kwargs, {"env_vars": {"OVERRIDE": "1"}}

    def state(self):
        resources = ray.get_runtime_context().get_assigned_resources()
        env = {name: os.environ.get(name) for name in ("ASKED", "OVERRIDE", "OF_CLASS", "OF_GROUP", "RANK")}
        return self.made_with, resources.get("GPU"), env


class Tagged:
    """Has Ray options as an attribute, and the short form of `configure_worker`."""

    _default_options = {"runtime_env": {"env_vars": {"TAG": "class", "KEPT": "class"}}}  # noqa: RUF012  the original form

    def __init__(self, tag):
        self.tag = tag

    @staticmethod
    def configure_worker(num_gpus, bundle_indices):
        return None, {"TAG": "configured"}, {"tag": bundle_indices}

    def state(self):
        return self.tag, os.environ["TAG"], os.environ["KEPT"]


@ray.remote
def double(x, y=0):
    return 2 * x + y, int(os.environ["EXECUTOR_CALL_INDEX"])


@ray.remote
def fail(x=0):
    raise LookupError("mine")


def list_names(**given):
    return sorted(given)


def read_environment(tag=None):
    wanted = "EXECUTOR_", "MEGASCALE_", "TPU_", "MINE"
    return tag, {name: value for name, value in os.environ.items() if name.startswith(wanted)}


def multiply(x, y=1):
    """Documented."""
    return x * y


class Model:
    """A class on every host."""

    def __init__(self, config):
        self.config = config

    def train(self, data, steps=1):
        return self.config * data * steps


class FailsOnce:
    """Fails as long as a file does not exist, which it makes."""

    def __init__(self, path):
        self.path = path

    def run(self):
        if not os.path.exists(self.path):
            Path(self.path).touch()
            raise LookupError("mine")
