# SPDX-License-Identifier: Apache-2.0
"""Where prompts come from, and how a stream continues."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_rollouts import IndexStream, LoaderStream


@given(size=st.integers(1, 200), seed=st.integers(0, 9), epoch=st.integers(0, 3))
def test_every_epoch_is_a_permutation(size, seed, epoch):
    """Each epoch has every index once, and the same arguments return the same stream."""
    stream = IndexStream(size, seed=seed)
    order = [stream.get(epoch * size + place) for place in range(size)]
    assert sorted(order) == list(range(size))
    assert order == [IndexStream(size, seed=seed).get(epoch * size + place) for place in range(size)]


def test_orders_differ():
    """Epochs and seeds have different orders, which do not begin alike."""
    orders = {
        tuple(IndexStream(1000, seed=seed).get(epoch * 1000 + place) for place in range(5))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_a_stream_ends_after_its_epochs():
    """The ordinal after the last epoch is an `IndexError`; without epochs there is no end."""
    assert IndexStream(3, seed=0, epochs=2).get(5) in (0, 1, 2)
    with pytest.raises(IndexError, match="ends after 2 epochs of 3 prompts"):
        IndexStream(3, seed=0, epochs=2).get(6)
    assert IndexStream(3, seed=0).get(10**9) in (0, 1, 2)


def test_sizes_are_checked():
    """A stream has prompts."""
    with pytest.raises(ValueError, match="size is 0 and epochs is None"):
        IndexStream(0, seed=0)


class Loader:
    """A loader with a state of its own, as those of torchdata have."""

    def __init__(self, items):
        self.items, self.position, self.read = items, 0, 0

    def __iter__(self):
        while self.position < len(self.items):
            self.position += 1
            self.read += 1
            yield self.items[self.position - 1]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@pytest.mark.parametrize("make", [Loader, list])
def test_a_loader_continues_where_it_was(make):
    """A restored stream returns the next item, also if the loader has no state of its own."""
    items = [f"item {number}" for number in range(10)]
    stream = LoaderStream(make(items), key=str.upper)
    assert [stream.get(ordinal) for ordinal in range(4)] == ["ITEM 0", "ITEM 1", "ITEM 2", "ITEM 3"]
    assert stream.get(3) == "ITEM 3"
    loader = make(items)
    later = LoaderStream(loader, key=str.upper)
    later.restore(stream.state(), 4)
    assert later.get(4) == "ITEM 4"
    if make is Loader:
        assert loader.read == 1
    with pytest.raises(ValueError, match="Ordinal 7 was requested, and the loader is at 5"):
        later.get(7)


def test_an_item_that_was_read_but_not_used():
    """A loader that is one item ahead of the ledger returns that item again."""
    stream = LoaderStream(Loader(["a", "b"]), key=str)
    stream.get(0)
    later = LoaderStream(Loader(["a", "b"]), key=str)
    later.restore(stream.state(), 0)
    assert [later.get(0), later.get(1)] == ["a", "b"]


def test_a_loader_ends():
    """The end of the loader is an `IndexError`, again and again."""
    stream = LoaderStream(["a"], key=str)
    stream.get(0)
    for _ in range(2):
        with pytest.raises(IndexError, match="ends after 1 items"):
            stream.get(1)


class EpochLoader(Loader):
    """A loader that begins its next epoch when it is read after its end, as torchdata's does."""

    def load_state_dict(self, state):
        self.position = state["position"] % len(self.items)


def test_a_loader_that_has_ended_stays_so():
    """A restored stream does not begin another epoch of the loader, whose prompts would be trained twice."""
    stream = LoaderStream(EpochLoader(["a", "b"]), key=str)
    for ordinal in (0, 1):
        stream.get(ordinal)
    with pytest.raises(IndexError):
        stream.get(2)
    later = LoaderStream(EpochLoader(["a", "b"]), key=str)
    later.restore(stream.state(), 2)
    for _ in range(2):
        with pytest.raises(IndexError, match="ends after 2 items"):
            later.get(2)
    later.restore(LoaderStream(EpochLoader(["a", "b"]), key=str).state(), 0)
    assert later.get(0) == "a"
