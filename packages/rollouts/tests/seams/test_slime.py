# SPDX-License-Identifier: Apache-2.0
"""The adapter for slime: over stand-ins of the parts of slime that it imports, and over the parts of a checkout."""

import importlib
import inspect
import random
import sys
from argparse import Namespace
from types import ModuleType

import pytest

from fairlead_rollouts import SnapshotError
from fairlead_rollouts.slime import LedgerDataSource, generate_rollout

pytestmark = pytest.mark.nightly


class Dataset:
    """In place of slime's dataset: each epoch has its own order."""

    def __init__(self, sample, size):
        self.sample, self.size = sample, size
        self.shuffle(0)

    def shuffle(self, epoch):
        order = list(range(self.size))
        random.Random(epoch).shuffle(order)
        self.samples = [self.sample(prompt=f"{epoch}:{place}") for place in order]

    def __len__(self):
        return self.size


class SampleStandIn:
    """In place of slime's `Sample`."""

    def __init__(self, prompt="", group_index=None, index=None):
        self.prompt, self.group_index, self.index = prompt, group_index, index


class SourceStandIn:
    """In place of slime's `RolloutDataSource`."""

    def __init__(self, args):
        self.args, self.dataset = args, None

    def __len__(self):
        return 0 if self.dataset is None else len(self.dataset)


def load_function_stand_in(path):
    """In place of slime's `load_function`."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.fixture(params=["stand-ins", "checkout"])
def sample(request, put_modules):
    """Return the class of samples, with slime's modules in place."""
    if request.param == "checkout":
        request.getfixturevalue("slime_source")
        return sys.modules["slime.utils.types"].Sample
    parts = {
        "slime": {},
        "slime.rollout": {},
        "slime.rollout.data_source": {"RolloutDataSource": SourceStandIn},
        "slime.utils": {},
        "slime.utils.misc": {"load_function": load_function_stand_in},
        "slime.utils.types": {"Sample": SampleStandIn},
    }
    put_modules(parts)
    return SampleStandIn


@pytest.fixture
def make(sample, tmp_path, monkeypatch):
    """Return a maker of a data source over ten prompts, with batches of two groups."""
    name = f"functions_{tmp_path.name}".replace(".", "_")  # slime keeps the functions that it has loaded
    functions = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, functions)

    def make(generate=None, size=10, **options):
        functions.current = generate or (lambda args, rollout_id, data_source, evaluation: [])
        defaults = {"n_samples_per_prompt": 2, "rollout_batch_size": 2, "rollout_shuffle": True, "load": str(tmp_path)}
        defaults |= {"rollout_global_dataset": True, "prompt_data": None, "update_weights_interval": 1}
        functions.generate = lambda *given, **options: functions.current(*given, **options)
        args = Namespace(
            **{**defaults, "save": str(tmp_path), "ledger_rollout_function": f"{name}.generate", **options}
        )
        source = LedgerDataSource(args)
        source._reader.dataset = Dataset(sample, size)
        return args, source

    return make


def ordinals(groups):
    return [group[0].group_index for group in groups]


def test_prompts_have_ordinals(make):
    """Groups have their ordinal as index, siblings count on, and a new epoch has its own order."""
    _, source = make(size=3)
    groups = source.get_samples(9)
    assert ordinals(groups) == [0, 1, 2, 3]
    assert [one.index for group in groups for one in group] == list(range(8))
    assert len({group[0].prompt for group in groups[:3]}) == 3
    assert groups[3][0].prompt.startswith("1:")
    assert source.get_samples(1) == []
    assert len(source) == 3


def test_aborted_groups_return(make):
    """A group that was aborted is given out again with its samples, before new ones."""
    _, source = make()
    groups = source.get_samples(2)
    source.add_samples([groups[1]])
    assert source.get_buffer_length() == 1
    again = source.get_samples(2)
    assert again[0] is groups[1]
    assert ordinals(again) == [1, 2]
    source.ledger.check()


def test_lost_groups_are_generated_again(make):
    """A group that its worker lost is given out again after the deadline, and its late result is refused."""
    _, source = make(ledger_deadline_s=-1.0)
    first = source.get_samples(1)
    assert ordinals(source.get_samples(1)) == [0]
    source._leases.clear()
    with pytest.raises(RuntimeError, match="ledger_deadline_s"):
        source.take(0, first)


def test_evaluation_is_not_recorded(make):
    """Evaluation passes through."""
    args, source = make(lambda args, rollout_id, data_source, evaluation: {"score": evaluation})
    assert generate_rollout(args, 0, source, evaluation=True) == {"score": True}
    assert source.ledger.statistics().claimed == 0


def test_prefetch_needs_a_version(make):
    """With `train_async.py` a rollout is always a version old."""
    with pytest.raises(ValueError, match="ledger_max_staleness is 0"):
        make(ledger_max_staleness=0)
    make(ledger_max_staleness=0, ledger_prefetch=0)


def test_resume_needs_a_snapshot(make):
    """A checkpoint without a snapshot is an error, and a run without a checkpoint begins at prompt 0."""
    _, source = make()
    source.load(-1)
    with pytest.raises(SnapshotError):
        source.load(3)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("interval", [1, 2])
def test_fifty_rollouts_with_crashes(make, seed, interval):
    """`train_async.py` generates a rollout ahead and saves: each resume continues where the checkpoint stands."""
    rng, finished = random.Random(seed), []

    def generate(args, rollout_id, data_source, evaluation):
        while len(finished) < 2:
            running.extend(data_source.get_samples(1))
            if running and rng.random() < 0.6:
                group = running.pop(rng.randrange(len(running)))
                if rng.random() < 0.1:
                    data_source.add_samples([group])
                else:
                    finished.append(group)
        batch = finished[:2]
        del finished[:2]
        return batch

    running, trained, saved, start = [], [], [], 0
    args, source = make(generate, update_weights_interval=interval)
    following = generate_rollout(args, 0, source)
    rollout_id = start
    while rollout_id < 50:
        batch, following = following, generate_rollout(args, rollout_id + 1, source)
        assert len(running) <= 2 * 2 * interval
        trained += ordinals(batch)
        if rollout_id % 3 == 0:
            source.save(rollout_id)
            saved, start = list(trained), rollout_id + 1
        source.ledger.check()
        rollout_id += 1
        if rng.random() < 0.1 and start:
            running.clear(), finished.clear()
            args, source = make(generate, update_weights_interval=interval)
            source.load(start - 1)
            trained, rollout_id = list(saved), start
            following = generate_rollout(args, rollout_id, source)
    assert len(set(trained)) == len(trained) == 100
    missing = set(range(max(trained))) - set(trained)
    assert {source.ledger.state(ordinal) for ordinal in missing} <= {"claimed", "sealed", "leased", "pending"}


def test_seam(slime_source):
    """The adapter has the methods of slime's data source, with their parameters."""
    for name, method in inspect.getmembers(slime_source.DataSource, inspect.isfunction):
        ours = inspect.signature(getattr(LedgerDataSource, name)).parameters
        assert list(ours) == list(inspect.signature(method).parameters), name
    source = inspect.getsource(slime_source.RolloutDataSource)
    assert all(f"self.{name}" in source or f"args.{name}" in source for name in ("dataset", "rollout_shuffle"))
