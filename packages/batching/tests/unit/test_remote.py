# SPDX-License-Identifier: Apache-2.0
"""Handles to batches: index arithmetic that moves nothing, counted on a pretended store. With Ray: tests/ray."""

import pickle
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_batching import BatchedDataDict, BatchLostError, RaggedLeaf, RemoteBatch, SlicedDataDict, plan_shards
from fairlead_batching import _remote as remote

ARGS = {"max_tokens_per_microbatch": 12, "input_key": "tokens", "input_lengths_key": "length"}
DYNAMIC = {"dynamic_batching_args": {**ARGS, "sequence_length_round": 2}}
PACKED = {"sequence_packing_args": {**ARGS, "algorithm": "balanced", "sequence_length_pad_multiple": 1, "cost": (1, 1)}}
LENGTHS_ONLY = {"length": [1, 2]}


class Ref:
    """A reference of the pretended store. Like Ray's, it is equal to its copies."""

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return self.number == other.number

    def __hash__(self):
        return hash(self.number)

    def hex(self):
        return f"{self.number:08x}"


class Store:
    """A store that copies nothing, and counts what is put and read."""

    class GetTimeoutError(Exception):
        pass

    class ObjectLostError(Exception):
        pass

    def __init__(self):
        self.values, self.lost, self.late = {}, set(), False
        self.puts = self.gets = self.bytes_read = 0
        self.exceptions = types.SimpleNamespace(
            GetTimeoutError=Store.GetTimeoutError, ObjectLostError=Store.ObjectLostError
        )

    def is_initialized(self):
        return True

    def put(self, value):
        self.puts += 1
        ref = Ref(len(self.values))
        self.values[ref] = value
        return ref

    def get(self, refs, timeout):
        assert timeout > 0
        if self.late:
            raise Store.GetTimeoutError
        for ref in refs:
            if ref in self.lost:
                error = Store.ObjectLostError("owner died")
                error.object_ref_hex = ref.hex()
                raise error
            self.gets += 1
            self.bytes_read += sum(getattr(leaf, "nbytes", 0) for leaf in self.values[ref].values())
        return [self.values[ref] for ref in refs]


@pytest.fixture
def store(monkeypatch):
    store = Store()
    monkeypatch.setattr(remote, "_require_ray", lambda: store)
    return store


def make(lengths):
    lengths = np.array(lengths)
    numbers = np.arange(len(lengths))
    batch = BatchedDataDict(
        tokens=np.where(np.arange(12) < lengths[:, None], numbers[:, None] + 1, 0),
        length=lengths,
        name=[f"sample {number}" for number in numbers],
        image={"patches": RaggedLeaf([np.full((length, 2), number) for number, length in enumerate(lengths)])},
    )
    batch.meta["step"] = 3
    return batch


def assert_same(one, other):
    assert list(one) == list(other)
    for key in one:
        left, right = (leaf.tolist() if isinstance(leaf, np.ndarray) else leaf for leaf in (one[key], other[key]))
        assert left == right, key
    assert one.meta == other.meta


def test_nothing_moves_on_a_pretended_batch_of_100_gb(store):
    """Leaves of 100 GB are stored once each; shards, selections and joins read 0 bytes and put nothing."""
    rows = 100_000
    batch = BatchedDataDict(
        tokens=np.broadcast_to(np.int32(7), (rows, 150_000)),
        logits=np.broadcast_to(np.float32(0), (rows, 100_000)),
        length=np.arange(rows) % 150_000,
    )
    assert sum(leaf.nbytes for leaf in batch.values()) > 100e9
    handle = RemoteBatch.put(batch, lengths_key="length")
    assert store.puts == 3
    how = {"dynamic_batching_args": {**ARGS, "sequence_length_round": 1, "max_tokens_per_microbatch": 1_000_000}}
    shards, order = handle.shard_by_batch_size(8, **how)
    mixed = np.random.default_rng(0).permutation(rows)
    shuffled = RemoteBatch.concat(shards).select_indices(np.argsort(order)).select_indices(mixed)
    parts = shuffled.shard_by_batch_size(8)
    again = RemoteBatch.concat(parts)
    assert (len(handle), len(shuffled), len(again)) == (rows, rows, rows)
    assert handle.keys() == ["tokens", "logits", "length"]
    assert again.rows["length"].tolist() == (mixed % 150_000).tolist()
    assert (store.puts, store.gets, store.bytes_read) == (3, 0, 0)
    assert len(pickle.dumps(shards[0])) < 24 * rows // 8 * 2
    assert again.slice(0, 3).fetch("length")["length"].tolist() == again.rows["length"][:3].tolist()
    assert (store.puts, store.gets, store.bytes_read) == (3, 1, batch["length"].nbytes)


@given(
    st.lists(st.integers(0, 12), min_size=2, max_size=9),
    st.none() | st.integers(1, 4),
    st.sampled_from([{}, {"allow_uneven_shards": True}, DYNAMIC, PACKED]),
    st.randoms(use_true_random=False),
)
def test_a_handle_is_the_batch(lengths, rows_per_object, how, rng):
    """Every operation on handles gives, once fetched, what it gives on the batch, for all leaves and any pieces."""
    store = Store()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "_require_ray", lambda: store)
        batch = make(lengths * 2)
        handle = RemoteBatch.put(batch, lengths_key="length", rows_per_object=rows_per_object)
        pieces = 1 if rows_per_object is None else -(-batch.size // rows_per_object)
        assert (store.puts, len(handle.stored)) == (4 * pieces, pieces)
        assert_same(handle.fetch(), batch)
        assert_same(handle.fetch("image"), batch.select("image"))
        indices = rng.choices(range(batch.size), k=5)
        assert_same(handle.select_indices(indices).fetch(), batch.select_indices(indices))
        assert_same(handle.slice(1, 3).fetch(), batch.slice(1, 3))
        try:
            shards = batch.shard_by_batch_size(2, **how)
        except ValueError as error:
            with pytest.raises(ValueError, match="cannot fill"):
                handle.shard_by_batch_size(2, **how)
            assert "cannot fill" in str(error)  # noqa: PT017 - other plans are made
            return
        remote_shards = handle.shard_by_batch_size(2, **how)
        if isinstance(shards, tuple):
            shards, order = shards
            remote_shards, remote_order = remote_shards
            assert order == remote_order
        for shard, remote_shard in zip(shards, remote_shards, strict=True):
            fetched = pickle.loads(pickle.dumps(remote_shard)).fetch()
            assert type(fetched) is SlicedDataDict
            assert_same(fetched, shard)
            assert fetched.plan == shard.plan
        assert_same(RemoteBatch.concat(remote_shards).fetch(), BatchedDataDict.from_batches(shards))
        assert store.puts == 4 * pieces


def test_results_are_joined_without_being_read(store):
    """Handles that others have made are joined by reference; shared pieces are kept once."""
    one, other = (RemoteBatch.put(make(lengths), lengths_key="length") for lengths in ([3, 1], [2, 2, 5]))
    joined = RemoteBatch.concat([one, other.select_indices([2, 0]), one.slice(1, 2)])
    assert (joined.size, len(joined.stored), store.gets) == (5, 2, 0)
    assert joined.rows["length"].tolist() == joined.fetch()["length"].tolist() == [3, 1, 5, 2, 1]
    assert joined.meta == {"step": 3}
    assert len(joined.slice(0, 2).stored) == 1
    store.gets = 0
    joined.slice(0, 2).fetch(["length"])
    assert store.gets == 1, "pieces without rows of the handle are not read"


def test_a_handle_keeps_plan_and_padding(store):
    """A shard that is put keeps its plan; padding and meta follow the rows."""
    padded = make([3, 1, 2]).pad_to_multiple(4)
    (shard,), _ = padded.shard_by_batch_size(1, **DYNAMIC)
    fetched = RemoteBatch.put(shard).fetch()
    assert fetched.get_microbatch_iterator_dynamic_shapes_len() == shard.get_microbatch_iterator_dynamic_shapes_len()
    handle = RemoteBatch.put(padded).select_indices([3, 1, 0, 2])
    assert handle.fetch().drop_padding().size == 3
    assert RemoteBatch.concat([handle, handle]).fetch().drop_padding().size == 6


def test_a_fetched_batch_is_private(store):
    """What fetch() returns may be written; the store does not change."""
    batch = make([3, 1])
    batch["log"] = [[1], [2]]
    handle = RemoteBatch.put(batch)
    handle.fetch()["tokens"][:] = 9
    handle.fetch()["log"][0][0] = 9
    assert_same(handle.fetch(), batch)
    assert batch["log"] == [[1], [2]]
    handle.fetch().meta["step"] = 9
    assert handle.meta == {"step": 3}


@pytest.mark.parametrize("rows", [[0, 1, 2], [1], []])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_fetched_ragged_rows_are_private(store, library, rows):
    """fetch() copies ragged rows, and only those of the handle, so that the stored object is not pinned."""
    made = [np.full((length, 2), length) for length in (3, 1, 2)]
    if library == "torch":
        made = list(map(pytest.importorskip("torch", reason="needs torch").from_numpy, made))
    stored = RaggedLeaf(made)
    fetched = RemoteBatch.put({"rows": stored}).select_indices(rows).fetch()["rows"]
    assert fetched == stored.take(np.array(rows, dtype=np.int64))
    assert not np.shares_memory(np.asarray(fetched.buffer), np.asarray(stored.buffer))
    assert fetched.buffer.nbytes == fetched.nbytes
    if library == "numpy":
        assert fetched.buffer.base is None, "the buffer is not a view of the store"


def test_a_handle_shows_itself(store):
    """As text a handle shows its size, keys and pieces, and reads nothing."""
    handle = RemoteBatch.put(make([3, 1, 2]), rows_per_object=2)
    assert repr(handle) == "RemoteBatch(size=3, keys=['tokens', 'length', 'name', 'image.patches'], pieces=2)"
    assert store.gets == 0


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda handle: RemoteBatch.put({"x": [1], "y": []}), ValueError, "different numbers of samples"),
        (
            lambda handle: RemoteBatch.put({"x": [1]}, lengths_key="y"),
            ValueError,
            r"Unknown lengths_key 'y'; .*\['x'\]",
        ),
        (lambda handle: RemoteBatch.put({"x": ["a"]}, lengths_key="x"), ValueError, "'x' must be whole numbers"),
        (
            lambda handle: RemoteBatch.put({"x": [1]}, rows_per_object=0),
            ValueError,
            "rows_per_object must be at least 1",
        ),
        (lambda handle: handle.fetch(["x"]), ValueError, "Unknown key 'x'; the batch has"),
        (lambda handle: handle.slice(2, 9), ValueError, "There is no slice from 2 to 9 of 4 samples"),
        (lambda handle: handle.select_indices([4]), ValueError, r"There are 4 samples, so none at \[4\]"),
        (lambda handle: handle.shard_by_batch_size(3), ValueError, "4 samples are not a multiple of shards=3"),
        (
            lambda handle: RemoteBatch.put(make([1, 2])).shard_by_batch_size(2, **DYNAMIC),
            ValueError,
            r"lengths of None, and the plan needs those of 'length': RemoteBatch.put\(batch, lengths_key='length'\)",
        ),
        (
            lambda handle: RemoteBatch.put(make([1, 2]).drop("tokens"), lengths_key="length").shard_by_batch_size(
                2, **DYNAMIC
            ),
            ValueError,
            "Unknown input_key 'tokens'",
        ),
        (lambda handle: handle.shard(plan_shards(5, 1)), ValueError, "another batch: it has 5 samples, the batch 4"),
        (
            lambda handle: handle.shard(plan_shards([3, 1, 2, 5], 2, **DYNAMIC)),
            ValueError,
            "another batch: sample 3 has 5 tokens in the plan, and 4 by 'length'",
        ),
        (
            lambda _: RemoteBatch.put({"tokens": np.ones((2, 4))}).shard(plan_shards([3, 5], 2, **DYNAMIC)),
            ValueError,
            "'length' says that sample 1 has 5 tokens; 'tokens' has width 4",
        ),
        (lambda handle: RemoteBatch.concat([]), ValueError, "There are no batches to join"),
        (
            lambda handle: RemoteBatch.concat([handle, {"x": [1]}]),
            TypeError,
            "Batch 1 must be a RemoteBatch, found dict",
        ),
        (
            lambda handle: RemoteBatch.concat([handle, RemoteBatch.put(make([1]).drop("name"))]),
            ValueError,
            r"differ in keys: .*\['name'\]",
        ),
    ],
)
def test_misuse(store, use, error, message):
    """What a handle cannot do is refused with the leaf, the row and the remedy, before anything is read."""
    handle = RemoteBatch.put(make([3, 1, 2, 4]), lengths_key="length")
    with pytest.raises(error, match=message):
        use(handle)
    assert store.gets == 0


def test_joined_meta_must_agree(store):
    """Handles with different meta are not joined, as batches are not."""
    batches = [make([1]), make([2])]
    batches[1].meta["step"] = 4
    with pytest.raises(ValueError, match=r"Batches 0 and 1 have different meta\['step'\]: 3 and 4"):
        RemoteBatch.concat(map(RemoteBatch.put, batches))


def test_a_dead_owner_is_a_typed_error(store):
    """The error names the leaf and the rows that are lost, and survives pickling."""
    batch = make([3, 1, 2, 4])
    handle = RemoteBatch.put(batch, rows_per_object=2)
    store.lost.add(handle.stored[1]["tokens"])
    assert handle.slice(0, 2).fetch().size == 2
    assert handle.fetch(["length"])["length"].tolist() == [3, 1, 2, 4]
    message = (
        r"Leaves \['tokens'\] are lost in 2 of 4 rows, from row 1 on: the process .* has ended.* put\(\) the batch"
    )
    with pytest.raises(BatchLostError, match=message) as caught:
        handle.select_indices([0, 3, 1, 2]).fetch()
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.keys, error.rows) == (("tokens",), (1, 3))
    assert str(error) == str(caught.value)


def test_a_late_store_is_a_timeout(store):
    """fetch() has a deadline, and the error says what was waited for."""
    handle = RemoteBatch.put(make([3, 1]))
    store.late = True
    with pytest.raises(
        TimeoutError, match=r"Leaves \['length'\] of 2 rows did not arrive in 0.5 s. Give fetch\(\) more"
    ):
        handle.fetch("length", timeout_s=0.5)


def test_without_ray(run_python):
    """Without Ray the error names the extra; with Ray that is not connected, no cluster is started."""
    script = """
        from fairlead_batching import RemoteBatch
        try:
            RemoteBatch.put({"x": [1]})
        except (ImportError, RuntimeError) as error:
            print(type(error).__name__, error)
    """
    without = run_python(script, block=["ray"])
    assert "ImportError RemoteBatch needs Ray" in without
    assert "pip install 'fairlead-batching[ray]'" in without
    pytest.importorskip("ray")
    assert run_python(script).startswith("RuntimeError RemoteBatch needs a connection to Ray: call ray.init()")
