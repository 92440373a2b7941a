# SPDX-License-Identifier: Apache-2.0
"""The adapter against the real replay buffer of verl 0.9.1, over a stand-in for its TransferQueue."""

import inspect
import random

import pytest

pytestmark = pytest.mark.nightly


class QueueStandIn:
    """In place of TransferQueue: prompts and trajectories by key, and the function that the trainer passes."""

    def __init__(self):
        self.listed = {"train": {}, "val": {}}
        self.step, self.number, self.refills, self.born = 1, 0, 0, {}

    def kv_list(self):
        return {partition: {key: dict(tag) for key, tag in items.items()} for partition, items in self.listed.items()}

    def kv_clear(self, *, partition_id, keys):
        for key in keys:
            self.listed[partition_id].pop(key, None)

    def submit(self, count, partition="train"):
        """Add prompts as the trainer does."""
        keys = [f"{partition}{self.number + one}" for one in range(count)]
        self.number += count
        self.born |= dict.fromkeys(keys, self.step)
        for key in keys:
            self.listed[partition][key] = {"is_prompt": True, "status": "running", "global_steps": self.step}
        return keys

    def refill(self, count):
        self.refills += count
        return self.submit(count)

    def finish(self, keys, status="finished", partition="train"):
        for key in keys:
            self.listed[partition][key]["status"] = status
            if status == "finished":
                self.listed[partition][f"{key}_0_0"] = {"status": "success", "global_steps": self.step}

    def running(self):
        return [key for key, tag in self.listed["train"].items() if tag["status"] == "running"]


@pytest.fixture
def queue(verl_buffer, monkeypatch):
    queue = QueueStandIn()
    monkeypatch.setattr(verl_buffer, "tq", queue)
    return queue


@pytest.fixture
def make(queue, verl_buffer):
    """Return a maker of the adapter with the arguments that verl's trainer passes to a custom sampler."""
    from fairlead_rollouts.verl import LedgerReplayBuffer

    def make(threshold=2, strategy="drop", **kwargs):
        buffer = LedgerReplayBuffer(
            trainer_mode="separate_async",
            trainer_config={},
            max_off_policy_threshold=threshold,
            max_off_policy_strategy=strategy,
            sampler_kwargs={key: value for key, value in ({"groups_per_version": 4} | kwargs).items() if value},
            refill_fn=queue.refill,
        )
        buffer.poll_interval = 0.001
        return buffer

    return make


def uids(batch):
    return [key.split("_")[0] for key in batch.keys]


def test_signature(verl_buffer):
    """verl passes the arguments that the adapter takes, and has the methods that it overrides."""
    from fairlead_rollouts.verl import LedgerReplayBuffer

    theirs = inspect.signature(verl_buffer.ReplayBufferAsync).parameters
    ours = inspect.signature(LedgerReplayBuffer).parameters
    assert [name for name in ours if name != "options"] == list(theirs)[:5]
    assert {"refill_fn", "filter_groups_metric"} <= theirs.keys()
    for name, method in vars(LedgerReplayBuffer).items():
        if inspect.isfunction(method) and name != "__init__":
            parent = inspect.unwrap(getattr(verl_buffer.ReplayBufferAsync, name))
            assert list(inspect.signature(method).parameters) == list(inspect.signature(parent).parameters), name


def test_sample(make, queue):
    """A batch is claimed oldest first, its prompts are removed from the queue, and the next step applies it."""
    buffer = make()
    keys = queue.submit(6)
    queue.finish(keys[1:])
    batch, metrics = buffer.sample(global_steps=1, partition_id="train", batch_size=4)
    assert uids(batch) == keys[1:5]
    assert metrics["training/rollouts/leased"] == 1
    assert keys[1] not in queue.listed["train"]
    queue.step = 2
    queue.finish([*queue.submit(4), keys[0]])
    batch, metrics = buffer.sample(global_steps=2, partition_id="train", batch_size=4)
    assert {keys[0], keys[5]} <= set(uids(batch))
    assert metrics["training/rollouts/applied"] == 4
    buffer.ledger.check()


def test_several_batches_of_one_step(make, queue):
    """A step of several local updates samples as often, and never more than a version trains."""
    buffer = make()
    queue.finish(queue.submit(8))
    for _ in range(2):
        assert len(uids(buffer.sample(1, "train", 2)[0])) == 2
    with pytest.raises(ValueError, match="4 of the 4 groups of version 2 are left"):
        buffer.sample(1, "train", 8)


def test_failed_groups_are_replaced(make, queue):
    """A group with a failed session is dropped and replaced by another prompt, once."""
    buffer = make()
    keys = queue.submit(4)
    queue.finish(keys[:3])
    queue.finish(keys[3:], "failure")
    assert buffer.get_sampleable_count(1, "train") == 3
    assert buffer.get_sampleable_count(1, "train") == 3
    queue.refill_now = queue.refill

    def refill(count):
        queue.finish(queue.refill_now(count))

    buffer.refill_fn = refill
    batch, metrics = buffer.sample(1, "train", 4)
    assert uids(batch) == [*keys[:3], "train4"]
    assert (queue.refills, metrics["training/rollout_failure/evicted_samples"]) == (1, 1)
    assert buffer.ledger.statistics().drops == {"failed": 1}


def test_stale_groups_are_dropped(make, queue):
    """With the strategy drop, a group older than the threshold is replaced, although it finishes late."""
    buffer = make(threshold=2)
    slow, *keys = queue.submit(9)
    queue.finish(keys)
    for step in (1, 2):
        queue.step = step
        buffer.sample(step, "train", 4)
    queue.step = 3
    queue.finish([slow, *queue.submit(4)])
    batch, metrics = buffer.sample(3, "train", 4)
    assert slow not in uids(batch)
    assert metrics["training/off_policy/evicted_samples"] == 1
    assert queue.refills == 1
    assert buffer.ledger.statistics().drops == {"stale": 1}


def test_waits_for_old_groups(make, queue, monkeypatch):
    """With the strategy wait, a batch that would make a running group too old waits until it is finished."""
    buffer = make(threshold=2, strategy="wait")
    slow, *keys = queue.submit(8)
    queue.finish(keys)
    buffer.sample(1, "train", 4)
    queue.step = 2
    queue.finish(queue.submit(4))
    polls = []

    def wait(partition_id, last):
        polls.append(partition_id)
        queue.finish([slow])
        return last

    monkeypatch.setattr(buffer, "_wait_for_next_poll", wait)
    batch, metrics = buffer.sample(2, "train", 4)
    assert polls == ["train"]
    assert slow in uids(batch)
    assert metrics["training/rollouts/waits"] == 1


def test_group_that_is_too_old_is_replaced(make, queue):
    """With the strategy wait too, no batch has a group above the threshold: after a short step one is replaced."""
    buffer = make(threshold=1, strategy="wait")
    slow, *keys = queue.submit(3)
    queue.finish(keys)
    buffer.sample(1, "train", 2)
    queue.step = 2
    queue.finish([slow])
    buffer.refill_fn = lambda count: queue.finish(queue.refill(count))
    batch, _ = buffer.sample(2, "train", 1)
    assert slow not in uids(batch)
    assert queue.refills == 1
    buffer.ledger.check()


def test_groups_without_a_signal(make, queue):
    """`filter_groups_metric` replaces groups whose trajectories have equal values."""
    buffer = make(filter_groups_metric="reward")
    keys = queue.submit(5)
    queue.finish(keys)
    buffer._dapo_filtered_keys = lambda partition: ({keys[0]} & buffer.finished_keys[partition], {1.0: 1})
    batch, metrics = buffer.sample(1, "train", 4)
    assert uids(batch) == keys[1:]
    assert metrics["training/filter_groups/evicted_samples"] == 1
    assert buffer.ledger.statistics().drops == {"no_signal": 1}


def test_validation_is_not_counted(make, queue):
    """Prompts of validation pass by the ledger."""
    buffer = make()
    keys = queue.submit(3, "val")
    queue.finish(keys, partition="val")
    batch, metrics = buffer.sample(1, "val", 3)
    assert sorted(uids(batch)) == keys
    assert metrics == {}
    assert buffer.ledger.statistics().applied == 0


def test_options(make):
    """An unknown option is refused, and so is a missing one."""
    with pytest.raises(ValueError, match=r"'group_size', 'groups_per_version'.*data\.train_batch_size"):
        make(group_size=4)
    with pytest.raises(ValueError, match=r"has \[\]; groups_per_version is needed"):
        make(groups_per_version=None)


@pytest.mark.parametrize("strategy", ["drop", "wait"])
@pytest.mark.parametrize("seed", range(10))
def test_fifty_steps(make, queue, strategy, seed):
    """In a random run, each prompt has one fate and no group is above the threshold, also after a resume."""
    rng, threshold = random.Random(seed), 2
    buffer = make(threshold=threshold, strategy=strategy)
    trained = []
    queue.submit(4)

    def poll(partition_id, last):
        for key in queue.running():
            slow = int(key.removeprefix("train")) % 10 == 0
            if rng.random() < (0.1 if slow else 0.6):
                queue.finish([key], "failure" if rng.random() < 0.1 else "finished")
        buffer.ledger.check()
        return last

    for step in range(1, 51):
        if step == 25:
            buffer = make(threshold=threshold, strategy=strategy)
        buffer._wait_for_next_poll = poll
        queue.step = step
        queue.submit(4)
        batch, _ = buffer.sample(step, "train", 4)
        trained += uids(batch)
        assert all(step - queue.born[uid] < threshold for uid in uids(batch))
    assert len(trained) == len(set(trained)) == 200
    numbers = buffer.ledger.statistics()
    known = sum(getattr(numbers, state) for state in ("pending", "leased", "sealed", "claimed", "applied", "dropped"))
    assert known == buffer.ledger._book.next
