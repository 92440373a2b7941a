# SPDX-License-Identifier: Apache-2.0
"""Stand-ins of the parts of slime and miles that the adapters import, and of what passes between them.

They say nothing of the frameworks: `seams/` runs the adapters in the frameworks' own loops.
"""

import enum
import random
import sys
from argparse import Namespace
from types import ModuleType


class SampleStandIn:
    """In place of `Sample`."""

    Status = enum.Enum("Status", ["COMPLETED", "ABORTED"])

    def __init__(self, prompt="", metadata=None):
        self.prompt, self.metadata = prompt, metadata or {}
        self.weight_versions, self.status = [], self.Status.COMPLETED

    @property
    def oldest_weight_version(self):
        return min(self.weight_versions, default=None)


class Dataset:
    """In place of the framework's, which needs a tokenizer: each epoch has its own order."""

    def __init__(self, size, sample=SampleStandIn):
        self.size, self.sample = size, sample
        self.shuffle(0)

    def shuffle(self, epoch):
        order = random.Random(epoch).sample(range(self.size), self.size)
        self.samples = [self.sample(prompt=f"{epoch}:{place}") for place in order]

    def __len__(self):
        return self.size


class SourceStandIn:
    """In place of `RolloutDataSource`."""

    def __init__(self, args):
        self.dataset = Dataset(args.prompts)

    def __len__(self):
        return len(self.dataset)


class WorkerStandIn:
    """In place of slime's `AsyncRolloutWorker`: it finishes what it gets immediately."""

    def __init__(self, args, data_buffer, concurrency):
        self.data_buffer, self.worker_thread = data_buffer, Namespace(is_alive=lambda: True)

    def start(self):
        pass

    stop = start

    def get_completed_groups(self, limit):
        return list(enumerate(self.data_buffer.get_samples(limit)))


def call_filter(function, *args):
    """In place of miles' `call_dynamic_filter`."""
    return Namespace(keep=True) if function is None else function(*args)


PARTS = {
    "miles.rollout.data_source": {"RolloutDataSource": SourceStandIn},
    "miles.rollout.filter_hub.base_types": {"call_dynamic_filter": call_filter},
    "miles.utils.misc": {"load_function": lambda path: path},
    "miles.utils.types": {"Sample": SampleStandIn},
    "slime.rollout.data_source": {"RolloutDataSource": SourceStandIn},
    "slime.rollout.fully_async_rollout": {"AsyncRolloutWorker": WorkerStandIn},
    "slime.rollout.sglang_rollout": {"generate_rollout": lambda *given, evaluation: {"evaluation": evaluation}},
    "slime.utils.http_utils": {"get_rollout_num_engines": lambda args: 1},
    "slime.utils.types": {"Sample": SampleStandIn},
}


def put_modules(monkeypatch):
    """Make the stand-ins importable under the frameworks' names."""
    for name, members in PARTS.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
            if end > 1:
                monkeypatch.setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[path], False)
        vars(sys.modules[name]).update(members)


def make_args(folder, **options):
    """Return the arguments of both frameworks, with batches of two groups of two."""
    given = {"n_samples_per_prompt": 2, "rollout_batch_size": 2, "update_weights_interval": 1, "prompts": 10}
    given |= {"rollout_shuffle": True, "save": str(folder), "load": str(folder), "start_rollout_id": None}
    given |= {"max_weight_staleness": 1, "async_unused_samples_handler": "retry", "sglang_server_concurrency": 4}
    given |= {"async_data_buffer_capacity_factor": 2.0, "dynamic_sampling_filter_path": None}
    return Namespace(**given | options)


def entry(group, version=None, *, aborted=False, result=None):
    """Return a finished group as miles puts it."""
    for sample in group:
        sample.weight_versions = [] if version is None else [version]
        if aborted:
            sample.status = SampleStandIn.Status.ABORTED
    return Namespace(prompt_group=group, group=result or group)


def first(group):
    """Return a sample of a group, whose trajectories may be lists."""
    return group[0][0] if isinstance(group[0], list) else group[0]


def prompt_ids(groups):
    """Return the prompt ids of groups."""
    return [first(group).group_index for group in groups]
