# SPDX-License-Identifier: Apache-2.0
"""Sequences in one row: the layout, the way back, and attention that gives the same log-probabilities."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_batching import BatchedDataDict, RaggedLeaf, SlicedDataDict

try:
    import torch
except ImportError:
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="needs torch")
PACKING = {
    "max_tokens_per_microbatch": 12,
    "input_key": "tokens",
    "input_lengths_key": "length",
    "algorithm": "balanced",
    "sequence_length_pad_multiple": 4,
}


def make_batch(lengths, width=None):
    """Return a batch with leaves of every kind, whose padding is 0."""
    width = max([*lengths, 1]) if width is None else width
    real = np.arange(width) < np.array(lengths)[:, None]
    tokens = np.where(real, np.arange(1, 1 + real.size).reshape(real.shape), 0)
    batch = BatchedDataDict(
        tokens=tokens,
        length=np.array(lengths),
        features=np.stack([tokens / 2, -tokens / 2], axis=2),
        name=[f"sample {number}" for number in range(len(lengths))],
        image=RaggedLeaf([np.full((length, 2), number) for number, length in enumerate(lengths)]),
    )
    if torch is not None:
        batch.update(half=torch.from_numpy(tokens).to(torch.bfloat16), flag=torch.from_numpy(real))
    batch.meta["step"] = 3
    return batch


def test_layout():
    """Tokens stand in one row; bounds are int32, positions restart, and other leaves are kept."""
    batch = make_batch([3, 0, 2])
    row = batch.to_packed(lengths_key="length", sequence_keys=["tokens", "features"])
    assert row["tokens"].tolist() == [[1, 2, 3, 7, 8]]
    assert row["features"].shape == (1, 5, 2)
    assert row.token_keys == ("tokens", "features")
    assert (row.cu_seqlens.tolist(), row.cu_seqlens.dtype) == ([0, 3, 3, 5], np.int32)
    assert row.cu_seqlens_padded.tolist() == [0, 3, 3, 5]
    assert (row.position_ids.tolist(), row.position_ids.dtype) == ([[0, 1, 2, 0, 1]], np.int64)
    assert row.max_seqlen == 3
    assert row["name"] is batch["name"]
    assert row["image"] is batch["image"]


def test_padding_to_a_multiple():
    """Each sequence takes up a multiple of tokens; both bounds are known, and padding has the value for its leaf."""
    row = make_batch([3, 0, 4]).to_packed(
        lengths_key="length", sequence_keys=["tokens"], pad_to_multiple=4, pad_value_dict={"tokens": -1}
    )
    assert row["tokens"].tolist() == [[1, 2, 3, -1, 9, 10, 11, 12]]
    assert row.cu_seqlens.tolist() == [0, 3, 3, 7]
    assert row.cu_seqlens_padded.tolist() == [0, 4, 4, 8]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert row.max_seqlen == 4
    assert row.unpack()["tokens"].tolist() == [[1, 2, 3, -1], [-1] * 4, [9, 10, 11, 12]]
    assert row.unpack(pad_value_dict={"tokens": 0})["tokens"].tolist() == make_batch([3, 0, 4])["tokens"].tolist()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 5), st.integers(0, 3))
def test_round_trip(lengths, multiple, extra):
    """Unpacking restores every leaf of the microbatch, its class, its meta and its dummy rows."""
    batch = make_batch(lengths, width=max([*lengths, 1]) + extra).pad_to_multiple(3)
    part = batch.slice(0, batch.size)
    keys = [key for key in ("tokens", "features", "half", "flag") if key in batch]
    row = part.to_packed(lengths_key="length", sequence_keys=keys, pad_to_multiple=multiple)
    assert (
        int(row.cu_seqlens_padded[-1])
        == row["tokens"].shape[1]
        == sum(-(-n // multiple) * multiple for n in part["length"])
    )
    back = row.unpack()
    assert type(back) is SlicedDataDict
    assert set(back) == set(part)
    for key in part:
        if key in keys:
            assert back[key].dtype == part[key].dtype
            assert back[key].tolist() == part[key].tolist()
        else:
            assert back[key] is part[key]
    assert back.meta == {"step": 3}
    assert back.drop_padding()["name"] == [f"sample {number}" for number in range(len(lengths))]


def test_microbatches_of_a_plan_know_their_leaves():
    """The bins of a plan are packed without naming leaves, and take up the tokens that the plan has counted."""
    lengths = [5, 3, 8, 1, 2, 7]
    batch = make_batch(lengths).select(["tokens", "length", "name", "image"])
    shards, order = batch.shard_by_batch_size(2, sequence_packing_args=PACKING)
    results = []
    for shard in shards:
        for group in (shard, shard.get_batch(0)):
            rows = [part.to_packed() for part in group.make_microbatch_iterator_for_packable_sequences()]
            assert [row["tokens"].shape[1] for row in rows] == shard.micro_batch_lengths[0]
        results += [row.unpack({"double": 2 * row["tokens"], "count": row["length"]}) for row in rows]
    restored = order.restore(results)
    assert restored["double"].tolist() == (2 * batch["tokens"]).tolist()
    assert restored["count"].tolist() == lengths


def test_a_result_of_one_sequence_that_is_as_wide_as_the_row():
    """token_keys tells a value for each token from a value for the only sequence; the shape cannot."""
    row = make_batch([3], width=5).to_packed(lengths_key="length", sequence_keys=["tokens"])
    results = {"double": 2 * row["tokens"], "hidden": np.ones((1, 3))}
    assert row.unpack(results)["hidden"].shape == (1, 5)
    unpacked = row.unpack(results, token_keys=["double"])
    assert unpacked["hidden"] is results["hidden"]
    assert unpacked["double"].tolist() == [[2, 4, 6, 0, 0]]
    for keys, message in (("x", r"Unknown token_keys \['x'\]; the results are"), ("wide", r"'wide' must be \(1, 3,")):
        with pytest.raises(ValueError, match=message):
            row.unpack({**results, "wide": np.ones((1, 4))}, token_keys=keys)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda batch: batch.to_packed(),
            r"lengths .* are unknown: the batch has no leaf None. Name it: lengths_key=.*'le",
        ),
        (lambda batch: batch.to_packed(lengths_key="x"), "the batch has no leaf 'x'"),
        (lambda batch: batch.to_packed(lengths_key="length"), r"The width of sequences is unknown.*sequence_keys=\["),
        (
            lambda batch: batch.to_packed(lengths_key="length", sequence_keys=["tokens", "x"]),
            r"Unknown sequence_keys \['x'\]",
        ),
        (lambda batch: batch.to_packed(lengths_key="length", sequence_keys=["name"]), r"Leaves \['name'\] .* no dim 1"),
        (lambda batch: batch.to_packed(lengths_key="name", sequence_keys=["tokens"]), "'name' must be whole numbers"),
        (
            lambda batch: batch.union({"narrow": np.ones((3, 2))}).to_packed(
                lengths_key="length", sequence_keys=["tokens", "narrow"]
            ),
            "'length' says that sample 0 has 3 tokens; 'narrow' has width 2",
        ),
        (
            lambda batch: batch.to_packed(lengths_key="length", sequence_keys=["tokens"], pad_to_multiple=0),
            "pad_to_multiple must be at least 1, got 0",
        ),
        (
            lambda batch: batch.to_packed(lengths_key="length", sequence_keys=["tokens"], pad_to_multiple=2**62),
            f"A row of {2**62} tokens is too long",
        ),
        (
            lambda batch: batch.to_packed(lengths_key="length", sequence_keys=["tokens"], pad_value_dict={"x": 0}),
            r"Unknown keys in pad_value_dict: \['x'\]; the leaves of sequences are \['tokens'\]",
        ),
        (
            lambda batch: batch.to_packed(
                lengths_key="length", sequence_keys=["tokens"], pad_to_multiple=4, pad_value_dict={"tokens": 0.5}
            ),
            r"Leaf 'tokens' cannot be padded with 0.5: its dtype is int64",
        ),
        (
            lambda batch: batch.slice(0, 0).to_packed(lengths_key="length", sequence_keys=["tokens"]),
            "nothing to pack: the batch has 0 samples",
        ),
        (
            lambda batch: batch.to_packed(lengths_key="length", sequence_keys=["tokens"]).unpack(
                {"x": np.ones((1, 4))}
            ),
            r"Leaf 'x' must be \(1, 5, ...\), .* each of the 3 sequences, found numpy float64\[1, 4\]",
        ),
    ],
)
def test_misuse(use, message):
    """What cannot be packed or unpacked is refused with the leaf, the row and the remedy."""
    with pytest.raises(ValueError, match=message):
        use(make_batch([3, 0, 2]))


@needs_torch
def test_tensors():
    """Bounds and positions are tensors on the device of the sequences, gradients pass through, and to() moves all."""
    tokens = torch.arange(6.0).reshape(2, 3).requires_grad_()
    batch = BatchedDataDict(tokens=tokens, length=torch.tensor([1, 3]), name=["a", "b"])
    row = batch.to_packed(lengths_key="length", sequence_keys=["tokens"], pad_to_multiple=2)
    assert row.cu_seqlens.dtype == row.cu_seqlens_padded.dtype == torch.int32
    assert row.position_ids.dtype == torch.int64
    (row.unpack({"x": row["tokens"] * 2})["x"].sum()).backward()
    assert tokens.grad.tolist() == [[2, 0, 0], [2, 2, 2]]
    moved = row.to("meta")
    assert {moved[key].device.type for key in ("tokens", "length")} == {"meta"}
    assert {value.device.type for value in (moved.position_ids, moved.cu_seqlens, moved.cu_seqlens_padded)} == {"meta"}


@needs_torch
@pytest.mark.parametrize("multiple", [1, 8])
def test_attention_in_a_row_gives_the_same_log_probabilities(multiple):
    """Attention with a block-diagonal mask over the row equals attention over each padded sequence."""
    torch.manual_seed(0)
    vocabulary, dim, heads = 17, 16, 2
    embedding, position = torch.nn.Embedding(vocabulary, dim), torch.nn.Embedding(16, dim)
    project, head = torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, vocabulary)

    def log_probs(tokens, positions, mask):
        x = embedding(tokens) + position(positions)
        q, k, v = (part.unflatten(2, (heads, -1)).transpose(1, 2) for part in project(x).chunk(3, dim=2))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return torch.log_softmax(head(x + attended.transpose(1, 2).flatten(2)), dim=2).gather(2, tokens[..., None])[
            ..., 0
        ]

    lengths = torch.tensor([7, 1, 12, 4, 9])
    width = int(lengths.max())
    tokens = torch.randint(1, vocabulary, (5, width)) * (torch.arange(width) < lengths[:, None])
    batch = BatchedDataDict(tokens=tokens, length=lengths)
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    expected = log_probs(tokens, torch.arange(width).expand(5, width), causal)

    row = batch.to_packed(lengths_key="length", sequence_keys=["tokens"], pad_to_multiple=multiple)
    total = row["tokens"].shape[1]
    sequence = torch.searchsorted(row.cu_seqlens_padded[1:].long(), torch.arange(total), right=True)
    block_diagonal = (sequence[:, None] == sequence) & torch.ones(total, total, dtype=torch.bool).tril()
    found = row.unpack({"log_probs": log_probs(row["tokens"], row.position_ids, block_diagonal)})["log_probs"]
    real = torch.arange(width) < lengths[:, None]
    torch.testing.assert_close(found[real], expected[real], rtol=1e-5, atol=1e-5)
    assert not found[~real].any()
    without = log_probs(row["tokens"], row.position_ids, torch.ones(total, total, dtype=torch.bool).tril())
    assert not torch.allclose(row.unpack({"x": without})["x"][real], expected[real], atol=1e-3), "the mask matters"
