# SPDX-License-Identifier: Apache-2.0
"""Batches by reference through Ray: fetched by tasks, joined from results, and lost with their owner."""

import time

import numpy as np
import pytest

from fairlead_batching import BatchedDataDict, BatchLostError, RaggedLeaf, RemoteBatch

ray = pytest.importorskip("ray", reason="needs ray")
torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("fairlead_placement", reason="the fixtures for Ray need fairlead-placement")

pytestmark = pytest.mark.usefixtures("local_ray")


def make(size=64):
    numbers = np.arange(size)
    batch = BatchedDataDict(
        tokens=torch.from_numpy(numbers)[:, None].expand(size, 5000).contiguous(),
        half=torch.from_numpy(numbers).to(torch.bfloat16),
        length=numbers % 7 + 1,
        name=[f"sample {number}" for number in numbers],
        image=RaggedLeaf([np.full((number % 3 + 1, 1000), number, np.float32) for number in numbers]),
        audio=RaggedLeaf([torch.full((number % 3 + 1, 1000), float(number)) for number in numbers]),
    )
    batch.meta["step"] = 3
    return batch


def check(batch, numbers):
    """Check that a fetched batch holds these samples, in memory of its own."""
    assert batch["tokens"].shape == (len(numbers), 5000)
    assert batch["tokens"][:, 0].tolist() == batch["half"].tolist() == list(numbers)
    assert batch["name"] == [f"sample {number}" for number in numbers]
    for key in ("image", "audio"):
        assert [float(row[0, 0]) for row in batch[key]] == list(numbers)
        assert [len(row) for row in batch[key]] == [number % 3 + 1 for number in numbers]
    assert batch["image"].nbytes == batch["image"].buffer.nbytes
    assert batch.meta == {"step": 3}
    batch["tokens"] += 1
    batch["length"][:] = 0


@ray.remote(num_cpus=0)
def train(handle):
    """Fetch the samples of a handle, check them, and return results by reference."""
    batch = handle.fetch()
    numbers = [int(name.split()[1]) for name in batch["name"]]
    check(batch, numbers)
    return RemoteBatch.put({"double": 2 * np.array(numbers), "name": batch["name"]})


@pytest.mark.parametrize("rows_per_object", [None, 10])
def test_shards_are_fetched_by_tasks(rows_per_object):
    """Each task gets a small handle, fetches its own rows, and may write to them; results come back as handles."""
    handle = RemoteBatch.put(make(), lengths_key="length", rows_per_object=rows_per_object)
    args = {"max_tokens_per_microbatch": 64, "input_key": "tokens", "input_lengths_key": "length"}
    shards, _ = handle.shard_by_batch_size(4, dynamic_batching_args={**args, "sequence_length_round": 1})
    assert max(len(ray.cloudpickle.dumps(shard)) for shard in shards) < 8_200
    results = ray.get([train.remote(shard) for shard in shards])
    assert all(isinstance(result, RemoteBatch) for result in results)
    check(handle.fetch(), range(64))


def test_results_are_joined_by_reference():
    """Results are joined without passing the driver: a task fetches the joined handle."""

    @ray.remote(num_cpus=0)
    class Worker:
        def double(self, handle):
            batch = handle.fetch("half")
            return RemoteBatch.put({"double": 2 * batch["half"].float()})

        def read(self, handle):
            return handle.fetch()["double"].tolist()

    workers = [Worker.remote() for _ in range(2)]
    handle = RemoteBatch.put(make())
    shards = handle.shard_by_batch_size(2)
    results = ray.get([worker.double.remote(shard) for worker, shard in zip(workers, shards, strict=True)])
    joined = RemoteBatch.concat(results)
    assert joined.size == 64
    assert ray.get(workers[0].read.remote(joined)) == [2.0 * number for number in range(64)]
    mixed = np.random.default_rng(0).permutation(64)
    assert ray.get(workers[0].read.remote(joined.select_indices(mixed))) == (2.0 * mixed).tolist()
    for worker in workers:
        ray.kill(worker)


def test_fetched_lists_are_private():
    """A write to an array in a fetched list does not change the stored batch, which other readers see."""
    handle = RemoteBatch.put({"log": [{"array": np.zeros(1000)} for _ in range(3)]})
    for log in handle.fetch()["log"]:
        log["array"] += 1
    assert [[float(log[key].sum()) for key in log] for log in handle.fetch()["log"]] == [[0.0]] * 3


def fetch_until_lost(handle, timeout_s=120):
    """Fetch again and again until Ray has noticed that the owner is gone."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        handle.fetch(timeout_s=timeout_s)
        time.sleep(0.1)


def test_a_dead_owner():
    """After the process that stored a batch has ended, fetch() raises a typed error that names leaf and rows."""

    @ray.remote(num_cpus=0)
    class Owner:
        def store(self):
            return RemoteBatch.put({"x": np.arange(1_000_000)})

    owner = Owner.remote()
    theirs = ray.get(owner.store.remote())
    mine = RemoteBatch.put({"x": np.arange(3)})
    joined = RemoteBatch.concat([mine, theirs])
    assert joined.slice(2, 5).fetch()["x"].tolist() == [2, 0, 1]
    ray.kill(owner)
    with pytest.raises(
        BatchLostError, match=r"Leaves \['x'\] are lost in 2 of 3 rows, from row 1 on: the process"
    ) as caught:
        fetch_until_lost(joined.slice(2, 5))
    assert caught.value.rows == (1, 2)
    assert joined.slice(0, 3).fetch()["x"].tolist() == [0, 1, 2]


def test_other_devices_are_refused():
    """A tensor that is not on the CPU is refused with the leaf and the remedy."""
    with pytest.raises(ValueError, match=r"Leaf 'x' is or holds a tensor on meta.*to_device\('cpu'\)"):
        RemoteBatch.put({"x": torch.zeros(2, device="meta")})
