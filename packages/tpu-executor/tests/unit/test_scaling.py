# SPDX-License-Identifier: Apache-2.0
"""How many slices to hold, and how long to wait for them."""

from hypothesis import given
from hypothesis import strategies as st

from fairlead_tpu_executor._reserve.scaling import Patience, choose_size, make_patience


def test_patience():
    """The wait for a replacement is much longer than for the first slices, but a smaller allowed number is accepted."""
    limits = {"scale_s": 600.0, "replace_s": 86400.0}
    assert make_patience([2], 0, 0, **limits) == Patience(600.0, 600.0)
    assert make_patience([2], 1, 1, **limits) == make_patience([1, 2], 1, 1, **limits) == Patience(600.0, 86400.0)
    assert make_patience([1, 2], 1, 0, **limits) == Patience(0.0, 0.0)
    assert make_patience([2], 1, 1, scale_s=600.0, replace_s=5.0) == Patience(5.0, 5.0)


@given(st.sets(st.integers(1, 8), min_size=1), st.integers(0, 8), st.integers(0, 8), st.booleans())
def test_sizes(sizes, held, free, waited_out):
    """The largest size is chosen at once if available; after the wait the largest available size; never another."""
    size = choose_size(sorted(sizes), held, free, waited_out=waited_out)
    possible = {one for one in sizes if one <= held + free}
    if max(sizes) in possible:
        assert size == max(sizes)
    elif waited_out and possible:
        assert size == max(possible)
    else:
        assert size is None
