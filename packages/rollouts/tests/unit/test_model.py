# SPDX-License-Identifier: Apache-2.0
"""Configurations are checked when they are made, values are frozen and can be pickled, and streams continue."""

import dataclasses
import os
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_rollouts import (
    Claim,
    Completeness,
    Group,
    IndexStream,
    LedgerConfig,
    OldWeightsError,
    ReadyFirst,
    Ref,
    Sample,
    Shortage,
    SnapshotError,
)

GOOD = {"group_size": 4, "groups_per_version": 2, "max_staleness": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 0}, "group_size is 0; it must be at least 1"),
        ({"max_staleness": -1}, "max_staleness is -1; it must be at least 0"),
        ({"serving_lag": 2}, "serving_lag is 2, above lookahead, which is 1"),
        ({"serving_lag": 2, "lookahead": 2}, "serving_lag is 2, above max_staleness, which is 1"),
        ({"completeness": Completeness(max_attempts=0)}, "max_attempts is 0"),
        ({"completeness": Completeness(min_samples=1)}, "min_samples is 1; with group_size 4 .* between 2 and 4"),
        ({"max_staleness": None}, "max_staleness is None"),
        ({"policy": ReadyFirst()}, "not ReadyFirst"),
        ({"lookahead": None}, "from 0 to max_staleness, which is 1, not None"),
        ({"lookahead": 2}, "which is 1, not 2"),
    ],
)
def test_wrong_configuration(options, message):
    """A wrong configuration is refused with the numbers that contradict each other."""
    with pytest.raises(ValueError, match=message):
        LedgerConfig(**{**GOOD, **options})


def test_most_open():
    """The most open groups follow from the gate and from `max_open`."""
    assert [LedgerConfig(**GOOD, max_open=most).most_open for most in (None, 3)] == [4, 3]
    assert LedgerConfig(**GOOD, serving_lag=1).most_open == 2


def test_durable_references_are_strings():
    """A durable reference that is not a string is refused, because a later process could not read it."""
    with pytest.raises(ValueError, match="has a string as its value, not 7"):
        Ref(7, durable=True)
    with pytest.raises(ValueError, match="is not valid UTF-8"):
        Ref(os.fsdecode(b"/data/\xff"), durable=True)


def test_values_and_errors_can_be_pickled():
    """Values are equal and frozen, and errors keep their attributes and their text."""
    claim = Claim(1, 0, (Group(7, (Sample(0, Ref("a"), 1, 2),), 1, 2, 1),))
    for value in (LedgerConfig(**GOOD), claim, Shortage("wait", 1, 2, (3,))):
        assert pickle.loads(pickle.dumps(value)) == value
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, 1)
    for error in (SnapshotError("path", "it is damaged", "Restore another one."), OldWeightsError(3, 4, 5)):
        copied = pickle.loads(pickle.dumps(error))
        assert (vars(copied), str(copied)) == (vars(error), str(error))


@given(size=st.integers(1, 200), seed=st.integers(0, 9), epoch=st.integers(0, 3))
def test_every_epoch_is_a_permutation(size, seed, epoch):
    """Each epoch has every index once, and the same arguments return the same stream."""
    stream = IndexStream(size, seed=seed)
    order = [stream.get(epoch * size + place) for place in range(size)]
    assert size < 20 or order != [stream.get(place) for place in range(size)] or epoch == 0
    assert sorted(order) == list(range(size))
    assert order == [IndexStream(size, seed=seed).get(epoch * size + place) for place in range(size)]


def test_a_stream_ends_after_its_epochs():
    """The prompt_id after the last epoch is an `IndexError`; without epochs there is no end."""
    assert IndexStream(3, seed=0, epochs=2).get(5) in (0, 1, 2)
    with pytest.raises(IndexError, match="ends after 2 epochs of 3 prompts"):
        IndexStream(3, seed=0, epochs=2).get(6)
    assert IndexStream(3, seed=0).get(10**9) in (0, 1, 2)
    with pytest.raises(ValueError, match="size is 0 and epochs is None"):
        IndexStream(0, seed=0)
