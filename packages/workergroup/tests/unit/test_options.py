# SPDX-License-Identifier: Apache-2.0
"""The options of actors: merging, pure."""

import copy

from hypothesis import given
from hypothesis import strategies as st

from fairlead_workergroup import recursive_merge_options

OPTIONS = st.recursive(
    st.integers() | st.text(max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3) | st.lists(inner, max_size=2),
)
DICTS = st.dictionaries(st.sampled_from("abc"), OPTIONS, max_size=3)


def test_deep_merge():
    """Dicts are merged deeply; other values are replaced, including lists."""
    default = {"a": {"b": {"c": 1, "d": [1]}}, "e": 1, "f": {"g": 1}}
    extra = {"a": {"b": {"d": [2], "h": 3}}, "e": {"i": 1}, "f": 2}
    assert recursive_merge_options(default, extra) == {
        "a": {"b": {"c": 1, "d": [2], "h": 3}},
        "e": {"i": 1},
        "f": 2,
    }


@given(DICTS, DICTS)
def test_unchanged_inputs(default, extra):
    """Neither input is changed, now or through the result."""
    before = copy.deepcopy((default, extra))
    merged = recursive_merge_options(default, extra)
    for value in merged.values():
        if isinstance(value, dict):
            value["changed"] = True
    assert (default, extra) == before


def test_nsight():
    """A `_nsight` entry at the top of runtime_env becomes Ray's `nsight`."""
    merged = recursive_merge_options({"runtime_env": {"_nsight": "default", "x": {"_nsight": 1}}}, {"_nsight": 2})
    assert merged == {"runtime_env": {"nsight": "default", "x": {"_nsight": 1}}, "_nsight": 2}
