# SPDX-License-Identifier: Apache-2.0
"""All results of a sharding, compared with a model that loops over all ranks."""

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fairlead_sharding import NamedSharding


@dataclass
class Model:
    """The rank at every coordinate, in a dict."""

    names: list[str]
    sizes: list[int]
    cells: dict[tuple[int, ...], int]

    @cached_property
    def sharding(self):
        return NamedSharding(self.nested(()), self.names)

    def nested(self, prefix):
        if len(prefix) == len(self.sizes):
            return self.cells[prefix]
        return [self.nested((*prefix, i)) for i in range(self.sizes[len(prefix)])]

    def coords(self):
        """(rank, {axis: coordinate}) of each rank in layout order."""
        return [(rank, dict(zip(self.names, at, strict=True))) for at, rank in self.cells.items()]

    def size(self, axis):
        return self.sizes[self.names.index(axis)]


@st.composite
def models(draw):
    # One draw for a whole model: drawing each number takes longer than everything that is tested with it.
    random = draw(st.randoms(use_true_random=True))
    names = random.sample("abcdef", random.randint(1, 4))
    sizes = random.choices(range(1, 5), k=len(names))
    places = list(itertools.product(*map(range, sizes)))
    start = random.randint(0, 3)
    ranks = list(range(start, start + len(places)))
    kind = random.choice(["counting", "dense", "sparse"])
    if kind == "sparse":
        ranks = [random.choice([0, 2**63 - 1]), *random.sample(range(1, 2**63 - 1), len(places) - 1)]
    if kind != "counting":
        random.shuffle(ranks)
    return Model(names, sizes, dict(zip(places, ranks, strict=True)))


@st.composite
def models_and_axes(draw):
    """A model and some of its axes, in any order."""
    model = draw(models())
    axes = draw(st.lists(st.sampled_from(model.names), unique=True))
    return model, axes


def same_cells(sharding, names, cells):
    """Assert that the sharding has these names and the model's ranks at every coordinate."""
    assert sharding.names == list(names)
    assert {at: int(rank) for at, rank in np.ndenumerate(sharding.layout)} == cells


@given(models())
def test_coords(model):
    """Each rank has the coordinates at which the layout has it."""
    sharding = model.sharding

    assert sharding.shape == dict(zip(model.names, model.sizes, strict=True))
    for rank, coords in model.coords():
        assert sharding.get_worker_coords(rank) == coords


@given(models(), st.data())
def test_ranks_by_coord(model, data):
    """The ranks that match, in ascending order; none outside an axis."""
    wanted = data.draw(st.dictionaries(st.sampled_from(model.names), st.integers(-1, 4)))
    expected = sorted(rank for rank, coords in model.coords() if wanted.items() <= coords.items())

    assert model.sharding.get_ranks_by_coord(**wanted) == expected


@given(models_and_axes(), st.data())
def test_get_ranks(model_and_axes, data):
    """The remaining axes, with the ranks that match."""
    model, axes = model_and_axes
    wanted = {axis: data.draw(st.integers(0, model.size(axis) - 1)) for axis in axes}
    found = model.sharding.get_ranks(**wanted)

    rest = [name for name in model.names if name not in wanted]
    cells = {
        tuple(coords[name] for name in rest): rank
        for rank, coords in model.coords()
        if wanted.items() <= coords.items()
    }
    if rest:
        same_cells(found, rest, cells)
    else:
        assert found == cells[()]


@given(models_and_axes())
def test_groups_and_peers(model_and_axes):
    """Ranks that agree on all other axes are one group, ordered by their coordinates along these."""
    model, axes = model_and_axes
    sharding = model.sharding
    groups = {}
    for rank, coords in model.coords():
        key = tuple(coords[name] for name in model.names if name not in axes)
        groups.setdefault(key, []).append((tuple(coords[axis] for axis in axes), rank))
    expected = [[rank for _, rank in sorted(groups[key])] for key in sorted(groups)]

    assert sharding.groups(*axes) == expected
    for group in expected:
        for rank in group:
            assert sharding.peers(rank, *axes) == group


@given(models_and_axes())
def test_piece_index_and_leaders(model_and_axes):
    """The coordinates along the axes, counted row-major in the order given; leaders are those at 0."""
    model, axes = model_and_axes
    order = {at: i for i, at in enumerate(itertools.product(*(range(model.size(axis)) for axis in axes)))}
    along = [tuple(coords[axis] for axis in axes) for _, coords in model.coords()]

    assert model.sharding.piece_index(*axes).tolist() == [order[at] for at in along]
    assert model.sharding.leaders(*axes).tolist() == [not any(at) for at in along]


@given(models(), st.data())
def test_at(model, data):
    """Python's own indexing, axis by axis."""
    wanted = {}
    for name, size in zip(model.names, model.sizes, strict=True):
        choice = data.draw(st.none() | st.integers(-size, size - 1) | st.slices(size))
        if choice is not None and not (isinstance(choice, slice) and not range(size)[choice]):
            wanted[name] = choice
    found = model.sharding.at(**wanted)

    picked = [range(size)[wanted.get(name, slice(None))] for name, size in zip(model.names, model.sizes, strict=True)]
    kept = [dim for dim, choice in enumerate(picked) if isinstance(choice, range)]
    cells = {}
    for at in itertools.product(*(range(len(picked[dim])) for dim in kept)):
        place = list(picked)
        for dim, i in zip(kept, at, strict=True):
            place[dim] = picked[dim][i]
        cells[at] = model.cells[tuple(place)]
    if kept:
        same_cells(found, [model.names[dim] for dim in kept], cells)
    else:
        assert found == cells[()]


@given(models(), st.data(), st.booleans())
def test_plan(model, data, dummies):
    """Each rank is called, gets its piece and returns a result as documented in `plan`."""
    roles = {name: data.draw(st.sampled_from(["sharded", "replicated", "free"])) for name in model.names}
    sharded = data.draw(st.permutations([name for name in model.names if roles[name] == "sharded"]))
    replicated = [name for name in model.names if roles[name] == "replicated"]
    output = data.draw(st.lists(st.sampled_from(model.names), unique=True))
    plan = model.sharding.plan(sharded, replicated, output, dummies)

    def nested(at):
        depth = len(at)
        return at if depth == len(sharded) else [nested((*at, i)) for i in range(model.size(sharded[depth]))]

    pieces = plan.pieces(nested(()))
    expected = []
    for rank, coords in sorted(model.coords()):
        first_along_free = all(coords[name] == 0 for name in model.names if roles[name] == "free")
        if first_along_free:
            expected.append((rank, tuple(coords[a] for a in sharded), all(coords[a] == 0 for a in output)))
        elif dummies:
            expected.append((rank, None, False))

    assert plan.called.tolist() == [rank for rank, _, _ in expected]
    assert [None if i < 0 else pieces[i] for i in plan.piece] == [piece for _, piece, _ in expected]
    assert plan.answers.tolist() == [answers for _, _, answers in expected]
    assert plan.returned.tolist() == [rank for rank, _, answers in expected if answers]
    assert plan.n_pieces == len(pieces)
    assert plan.piece_shape == tuple(model.size(axis) for axis in sharded)


@given(models())
def test_other_forms(model):
    """Plain data round-trips, and every rank of a small layout is in its text."""
    sharding = model.sharding

    assert NamedSharding.from_dict(sharding.to_dict()) == sharding
    assert NamedSharding(sharding.layout, sharding.names) == sharding
    if sharding.size <= 8:  # more grids than that are shortened
        shown = sharding.render().split()
        assert all(str(rank) in shown for rank, _ in model.coords())
