# SPDX-License-Identifier: Apache-2.0
"""Where prompts come from, and how a stream continues."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_rollouts import IndexStream


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
