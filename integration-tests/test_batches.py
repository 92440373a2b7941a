# SPDX-License-Identifier: Apache-2.0
"""Tests of a batch that is sharded for all dp ranks, processed in microbatches and restored to its order."""

import numpy as np
import pytest
import ray
from ray.experimental.locations import get_local_object_locations

from fairlead_batching import BatchedDataDict, DynamicBatchingArgs, RemoteBatch, SequencePackingArgs
from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, Shard, current_worker

KEYS = {"input_key": "tokens", "input_lengths_key": "length"}
DYNAMIC = DynamicBatchingArgs(max_tokens_per_microbatch=32, sequence_length_round=4, **KEYS)
PACKED = SequencePackingArgs(
    max_tokens_per_microbatch=32, sequence_length_pad_multiple=4, algorithm="first_fit_decreasing", **KEYS
)
AXES = NamedSharding.from_shape(dp=2, tp=2)


class Scorer:
    """A worker that adds its weight to tokens, microbatch by microbatch."""

    def __init__(self, weight: int) -> None:
        self.weight = weight

    def weights(self) -> np.ndarray:
        return np.full(50_000, self.weight)

    def load(self, weights: np.ndarray) -> None:
        self.weight = int(weights[0])

    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        packed = shard.elem_counts_per_gb is not None
        scored = []
        for number in range(len(shard.micro_batch_indices)):
            group = shard.get_batch(number)
            batches = (
                group.make_microbatch_iterator_for_packable_sequences()
                if packed
                else group.make_microbatch_iterator_with_dynamic_shapes()
            )
            scored.append([self._score(batch, number) for batch in batches])
        answer = BatchedDataDict.from_batches([batch for group in scored for batch in group], {"scores": -1})
        answer["microbatches"] = [tuple(map(len, scored))] * shard.size
        return answer

    def train(self, handle: RemoteBatch) -> RemoteBatch:
        """Fetch the shard of a handle, and return the scores by reference."""
        assert isinstance(handle, RemoteBatch)
        scored = self.score(handle.fetch()).select(["scores", "name", "dp"])
        return RemoteBatch.put(scored)

    def count(self, handle: RemoteBatch) -> list[str]:
        return handle.fetch("name")["name"]

    def _score(self, batch: BatchedDataDict, group: int) -> dict:
        dp = [current_worker().coords["dp"]] * batch.size
        return {"scores": batch["tokens"] + self.weight, "name": batch["name"], "group": [group] * batch.size, "dp": dp}


@pytest.fixture(scope="module")
def groups(local_ray):
    with (
        RayVirtualCluster([4], use_gpus=False, enable_colocation=True, name="road") as cluster,
        RayWorkerGroup(cluster, RayWorkerBuilder(Scorer, 7), [1], name_prefix="policy") as policy,
        RayWorkerGroup(cluster, RayWorkerBuilder(Scorer, 0), sharding_annotations=AXES) as generation,
    ):
        yield policy, generation


@pytest.fixture
def puts(monkeypatch):
    """Return a list that gets the size in bytes of each value that the test stores."""
    sizes, put = [], ray.put

    def put_and_note(value, **options):
        ref = put(value, **options)
        sizes.append(get_local_object_locations([ref])[ref]["object_size"])
        return ref

    monkeypatch.setattr(ray, "put", put_and_note)
    return sizes


@pytest.mark.smoke
@pytest.mark.parametrize(
    "how", [{"dynamic_batching_args": DYNAMIC}, {"sequence_packing_args": PACKED}], ids=["dynamic", "packed"]
)
def test_batch_round_trip(groups, puts, how):
    """Every sample is scored once and returned in its original position.

    The weights go to the workers by reference, and the batch contains dummy rows. All ranks run the same number of
    microbatches in each group. Each shard is stored once although two workers receive it, and one worker per dp
    coordinate returns a result.
    """
    policy, generation = groups
    generation.call("load", policy.call("weights", collect=()))
    assert puts == []
    rng = np.random.default_rng(0)
    length = rng.integers(1, 17, 11)
    prompts = BatchedDataDict(
        tokens=np.where(np.arange(16) < length[:, None], rng.integers(10, 99, (11, 16)), 0),
        length=length,
        name=[f"prompt {number}" for number in range(11)],
    )
    batch = prompts.repeat_interleave(3).pad_to_multiple(4)
    shards, order = batch.shard_by_batch_size(2, batch.size // 2, **how)
    call = generation.call("score", Shard(shards, "dp"), collect="dp", timeout=60)
    scored = order.restore(call.result(), {"scores": -1}).drop_padding(like=batch)

    assert len(puts) == 2
    assert (call.called_workers, len(call.return_from_workers)) == ([0, 1, 2, 3], 2)
    assert scored.size == 33
    assert scored["name"] == [f"prompt {number // 3}" for number in range(33)]
    assert scored["group"] == [0] * 18 + [1] * 15  # The batch has 36 rows, including the dummy rows.
    assert set(scored["dp"]) == {0, 1}
    assert len(set(scored["microbatches"])) == 1
    assert all(count > 1 for count in scored["microbatches"][0])
    for row, tokens, real in zip(scored["scores"], np.repeat(prompts["tokens"], 3, 0), length.repeat(3), strict=True):
        assert row[:real].tolist() == (tokens[:real] + 7).tolist()


def test_call_of_one_dp_rank(groups):
    """A batch that is sharded for one dp rank is sent to the workers of that rank only."""
    _, generation = groups
    batch = BatchedDataDict(tokens=np.arange(12).reshape(3, 4), length=np.array([4, 1, 2]), name=list("abc"))
    shards, order = batch.shard_by_batch_size(1, dynamic_batching_args=DYNAMIC)
    call = generation.at(dp=1).call("score", shards[0], collect=(), timeout=60)
    scored = order.restore([call.result()])
    assert (scored["name"], scored["dp"]) == (["a", "b", "c"], [1, 1, 1])
    assert len(call.called_workers) == 2


@pytest.mark.smoke
def test_a_batch_by_reference(groups, puts):
    """Workers get handles to their shards, and results are joined and passed on without passing the driver."""
    policy, generation = groups
    length = np.random.default_rng(0).integers(1, 17, 32)
    tokens = np.where(np.arange(5000) < length[:, None], 5, 0)
    batch = BatchedDataDict(tokens=tokens, length=length, name=[f"prompt {number}" for number in range(32)])
    remote = RemoteBatch.put(batch, lengths_key="length")
    shards, order = remote.shard_by_batch_size(2, dynamic_batching_args=DYNAMIC)
    puts.clear()
    results = generation.call("train", Shard(shards, "dp"), collect="dp", timeout=60).result()
    assert [type(result) for result in results] == [RemoteBatch] * 2
    assert len(puts) == 2, "a handle for each dp coordinate"
    assert sum(puts) < 20_000 < tokens.nbytes
    scored = RemoteBatch.concat(results).select_indices(np.argsort(order))
    assert policy.call("count", scored, timeout=60).result() == [batch["name"]]
    back = scored.fetch()
    assert back["name"] == batch["name"]
    assert sorted(set(back["dp"])) == [0, 1]
    plain = generation.call("count", Shard(remote.shard_by_batch_size(2), "dp"), collect="dp", timeout=60).result()
    assert [name for names in plain for name in names] == batch["name"]
