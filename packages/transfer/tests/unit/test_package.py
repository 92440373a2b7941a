# SPDX-License-Identifier: Apache-2.0
"""Errors that travel, and what they say."""

import pickle

import pytest

from fairlead_transfer import RankFailure, StaleWeightsError, TransferError

FAILURES = tuple(RankFailure("target", rank, "abcdef0123", "it was killed") for rank in range(20))


def test_errors_travel():
    """An error pickles with all it says."""
    error = TransferError("commit", 3, FAILURES, {0: 3, 1: "inconsistent", 2: None, 3: "committing"}, "Do this.")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert (copy.phase, copy.version, copy.failures, copy.versions) == ("commit", 3, FAILURES, error.versions)


def test_errors_say_what_holds():
    """Before the decision the text says that nothing has changed, after it who holds what; of many ranks, the first."""
    error = TransferError("move", 3, FAILURES, {}, "Do this.")
    assert "phase 'move'" in str(error)
    assert "All target ranks hold what they held before." in str(error)
    assert "target rank 0 on node abcdef01: it was killed" in str(error)
    assert "and 4 others" in str(error)
    assert str(error).endswith("Do this.")
    decided = TransferError("commit", 3, FAILURES[:1], {0: 3, 1: "inconsistent", 2: None}, "Do this.")
    assert "hold 3: ranks 0; inconsistent: ranks 1; nothing: ranks 2" in str(decided)


@pytest.mark.parametrize(
    ("needed", "held", "advice"),
    [
        (None, None, "Send a version first."),
        (2, 1, "Bring them up with `sync()` of the link."),
        (2, "inconsistent", "Bring them up with `sync()` of the link."),
    ],
)
def test_stale_weights_say_what_to_do(needed, held, advice):
    """The advice is the one that helps: send, or bring up."""
    error = StaleWeightsError("generate", needed, {1: held})
    assert advice in str(error)
    assert "None" not in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
