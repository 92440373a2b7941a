# SPDX-License-Identifier: Apache-2.0
"""Label selectors match the nodes that Ray matches."""

import re

import pytest

from fairlead_placement import RayVirtualCluster
from fairlead_placement._model import matches


def check_selector(selector):
    RayVirtualCluster([1], label_selector=selector)


# Each answer is the one that Ray 2.60 gave for a node with the label a = x and the label e with an empty value.
@pytest.mark.parametrize(
    ("key", "condition", "expected"),
    [
        ("a", "x", True),
        ("a", "!x", False),
        ("a", "y", False),
        ("a", "!y", True),
        ("a", "in(x,y)", True),
        ("a", "in(y,x)", True),
        ("a", "!in(x,y)", False),
        ("a", "!in(y,z)", True),
        ("a", "in", False),
        ("e", "", True),
        ("missing", "x", False),
        ("missing", "!x", True),
        ("missing", "in(x)", False),
        ("missing", "!in(x)", True),
        ("missing", "", False),
    ],
)
def test_matches(key, condition, expected):
    """A condition matches a label as in Ray. A missing label has none of any values."""
    check_selector({key: condition})
    assert matches({key: condition}, {"a": "x", "e": ""}) is expected


@pytest.mark.parametrize(
    "condition",
    ["!", "in()", "!in()", " x", "x ", "in(x,,y)", "in(x,  y)", "in(x,)", "!!x", "in (x)", "in(x", "(x)", "-x", "x-",
     "x y", "x" * 64, "!in(x,y))", "a=b"],
)  # fmt: skip
def test_bad_conditions(condition):
    """A condition that Ray refuses is refused, and so is "(x)", which Ray accepts and never matches."""
    message = f"label_selector must have conditions 'v', '!v', 'in(a,b)' or '!in(a,b)', got {condition!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_selector({"zone": condition})


@pytest.mark.parametrize("selector", [{"a": None}, {"a": 1}, {1: "a"}])
def test_no_strings(selector):
    """Keys and conditions are strings."""
    with pytest.raises(TypeError, match="maps label names to conditions, both strings, got"):
        check_selector(selector)
