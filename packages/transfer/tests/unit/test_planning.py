# SPDX-License-Identifier: Apache-2.0
"""Plans are compared, element by element, with what the layouts say."""

import os
import random

import numpy as np
import pytest

from fairlead_sharding import NamedSharding
from fairlead_transfer import Layout, reshard

# `nox -s nightly` compares 10,000.
PAIRS = int(os.environ.get("FAIRLEAD_PAIRS", "300"))
pytestmark = [pytest.mark.nightly] if "FAIRLEAD_PAIRS" in os.environ else []


def random_layout(rng, shape):
    """Return a layout of a random mesh of up to 4 axes; or, one time in five, boxes that overlap anyhow."""
    if rng.random() < 0.2:
        ranks = rng.randint(1, 6)
        offsets = [[rng.randint(0, length) for length in shape] for _ in range(ranks)]
        sizes = [[rng.randint(0, n - at) for n, at in zip(shape, box, strict=True)] for box in offsets]
        return Layout(shape, np.array(offsets).reshape(ranks, -1), np.array(sizes).reshape(ranks, -1))
    names = ["a", "b", "c", "d"][: rng.randint(1, 4)]
    mesh = {name: rng.choice([1, 2, 2, 3]) for name in names}
    dims = {}
    for name in rng.sample(list(mesh), len(mesh)):
        if rng.random() < 0.75:
            dims.setdefault(rng.randrange(len(shape)), []).append(name)
    return Layout.from_sharding(shape, NamedSharding.from_shape(**mesh), dims)


def holders(layout):
    """Return for each rank which elements it holds."""
    masks = np.zeros((layout.ranks, *layout.shape), bool)
    for mask, offset, size in zip(masks, layout.offsets, layout.sizes, strict=True):
        mask[tuple(slice(at, at + length) for at, length in zip(offset, size, strict=True))] = True
    return masks


def check(source, target, source_nodes, target_nodes, tensors):
    """Compare a plan with the masks of the layouts."""
    names = [f"t{number}" for number in range(tensors)]
    plan = reshard(
        dict.fromkeys(names, source),
        dict.fromkeys(names, target),
        source_nodes=source_nodes,
        target_nodes=target_nodes,
    )
    assert sorted(plan.names) == names
    (tensor_set,) = plan.tensor_sets
    held, wanted, pieces = holders(source), holders(target), tensor_set.pieces
    boxes = [
        tuple(slice(at, at + length) for at, length in zip(*box, strict=True))
        for box in zip(pieces.starts, pieces.sizes, strict=True)
    ]
    for senders in pieces.senders:
        fetched = np.zeros(wanted.shape, int)
        direct = {}
        for row, (sender, receiver, via, box) in enumerate(
            zip(senders, pieces.receivers, pieces.via, boxes, strict=True)
        ):
            fetched[receiver][box] += 1
            assert held[sender][box].all()
            near = [rank for rank in range(source.ranks) if source_nodes[rank] == target_nodes[receiver]]
            if any(held[rank][box].all() for rank in near):
                assert source_nodes[sender] == target_nodes[receiver]
                assert via == -1
            else:
                key = target_nodes[receiver], pieces.starts[row].tobytes()
                if via == -1:
                    assert key not in direct  # it crosses to this node once
                    direct[key] = receiver
        assert np.array_equal(fetched, wanted.astype(int))
        for row in np.flatnonzero(pieces.via >= 0):
            receiver = pieces.receivers[row]
            assert direct[target_nodes[receiver], pieces.starts[row].tobytes()] == pieces.via[row]
            assert target_nodes[pieces.via[row]] == target_nodes[receiver]
    assert plan.bytes_moved == tensors * int(wanted.sum())
    between = 0
    for node in set(target_nodes):
        there = np.array([one == node for one in source_nodes])
        needed = wanted[[one == node for one in target_nodes]].any(axis=0)
        between += int((needed & ~held[there].any(axis=0)).sum())
    assert plan.bytes_between_nodes == tensors * between


def check_random(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(1, 3)))
    source = random_layout(rng, shape)
    target = random_layout(rng, shape)
    # The first source rank holds whatever the others leave.
    source = Layout(
        shape,
        np.vstack([source.offsets, np.zeros((1, len(shape)), int)]),
        np.vstack(
            [source.sizes, [shape if rng.random() < 0.5 or not holders(source).any(0).all() else [0] * len(shape)]]
        ),
    )
    nodes = rng.randint(1, 3)
    source_nodes = [rng.randrange(nodes) for _ in range(source.ranks)]
    target_nodes = [rng.randrange(nodes + 1) for _ in range(target.ranks)]
    check(source, target, source_nodes, target_nodes, tensors=rng.randint(1, 3))


def test_random_pairs():
    """Every element arrives once, from a rank that holds it, over as few nodes and processes as possible."""
    for seed in range(PAIRS):
        try:
            check_random(seed)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


def test_scalars():
    """A scalar is held as a whole or not at all."""
    held = Layout((), offsets=[[0], [0]], sizes=[[0], [1]])
    plan = reshard(held, Layout.replicated((), 2), source_nodes="ab", target_nodes="ab")
    assert plan.bytes_moved == 2
    assert plan.bytes_between_nodes == 1
    assert plan.tensor_sets[0].pieces.senders.tolist() == [[1, 1]]


def test_empty_tensors():
    """A tensor without elements has no pieces."""
    plan = reshard(Layout.replicated((0, 3), 2), Layout.replicated((0, 3), 1), source_nodes="ab", target_nodes="a")
    assert plan.bytes_moved == 0
    assert len(plan.tensor_sets[0].pieces.receivers) == 0


def count_sent(plan):
    """Return the bytes that each source rank sends; what crosses to a node for several ranks counts once."""
    sent = np.zeros(len(plan.source_nodes))
    for same in plan.tensor_sets:
        for senders in same.pieces.senders:
            np.add.at(sent, senders, same.pieces.volumes * (same.pieces.via < 0) * same.source.itemsize)
    return sent


@pytest.mark.parametrize("tensors", [1, 2, 7, 200])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({"rep": 4}, {"tp": 4}),
        ({"rep": 4}, {"tp": 8}),
        ({"rep": 2, "dp": 4}, {"tp": 4}),
        ({"rep": 4, "dp": 2}, {"copy": 4, "tp": 2}),
    ],
)
def test_senders_are_balanced(source, target, tensors):
    """Replicas share the work: the busiest sender has at most 5 % more than the mean, where an even split exists."""
    meshes = [NamedSharding.from_shape(**mesh) for mesh in (source, target)]
    names = [f"t{number}" for number in range(tensors)]
    held = Layout.from_sharding((64, 8), meshes[0], {0: "dp"} if "dp" in source else {})
    wanted = Layout.from_sharding((64, 8), meshes[1], {0: "tp"})
    for nodes in ("s", "t"):
        plan = reshard(
            dict.fromkeys(names, held),
            dict.fromkeys(names, wanted),
            source_nodes=["s"] * held.ranks,
            target_nodes=[nodes] * wanted.ranks,
        )
        sent = count_sent(plan)
        if int((plan.tensor_sets[0].pieces.via < 0).sum()) * tensors % held.ranks == 0:
            assert sent.max() <= 1.05 * sent.mean()


def test_senders_are_balanced_over_many_shapes():
    """Tensors that are all different are spread over the replicas, the largest first."""
    rng = random.Random(0)
    shapes = {f"t{number}": (rng.randint(100, 10_000), 8) for number in range(100)}
    plan = reshard(
        {name: Layout.replicated(shape, 4) for name, shape in shapes.items()},
        {name: Layout.replicated(shape, 1) for name, shape in shapes.items()},
        source_nodes="abcd",
        target_nodes="e",
    )
    assert count_sent(plan).max() <= 1.05 * count_sent(plan).mean()


def test_same_layouts_are_planned_once():
    """Tensors with equal layouts are one tensor_set, also if the layouts are other objects."""
    held = {name: Layout.replicated((4,), 2) for name in "abc"}
    wanted = {name: Layout.replicated((4,), 3) for name in "abc"}
    plan = reshard(held, wanted, source_nodes="xx", target_nodes="xxx")
    assert [tensor_set.names for tensor_set in plan.tensor_sets] == [("a", "b", "c")]
    assert plan.bytes_moved == 3 * 3 * 4
