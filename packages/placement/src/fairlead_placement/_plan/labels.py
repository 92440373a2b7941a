# SPDX-License-Identifier: Apache-2.0
"""Ray's label selectors: which nodes may take a bundle."""

import re
from collections.abc import Mapping
from functools import lru_cache

__all__ = ["check_selector", "matches", "parse_condition"]

_VALUE = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_KEY = re.compile(rf"(?:(?=[^/]{{1,253}}/){_VALUE}(?:\.{_VALUE})*/)?{_VALUE}")
_ONE = re.compile(rf"(!?)({_VALUE})")
_SEVERAL = re.compile(rf"(!?)in\(({_VALUE}(?:, ?{_VALUE})*)\)")


@lru_cache(maxsize=4096)
def parse_condition(text: str) -> tuple[bool, frozenset[str]]:
    """What a label must be: (True, values) is one of the values, (False, values) is none of them.

    Raises:
        ValueError: not "v", "!v", "in(a,b)" or "!in(a,b)".

    "" asks for a label whose value is empty, as it does for Ray. Two things that Ray takes and then never matches
    differ here: a space after a comma means nothing, and "(a,b)" without "in" is refused.

    >>> parse_condition("!spot")
    (False, frozenset({'spot'}))
    """
    if text == "":
        return True, frozenset([""])
    found = _ONE.fullmatch(text) or _SEVERAL.fullmatch(text)
    if found is None:
        raise ValueError(f"a label selector must be 'v', '!v', 'in(a,b)' or '!in(a,b)', got {text!r}")
    negated, values = found.groups()
    return not negated, frozenset(value.strip() for value in values.split(","))


def check_selector(selector: Mapping[str, str]) -> None:
    """Refuse a selector that Ray would not take, before anything is planned with it.

    Raises:
        TypeError: a key or a condition is not a string.
        ValueError: a key is no label name, or a condition has a wrong syntax.
    """
    for key, text in selector.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise TypeError(f"a label selector maps label names to conditions, both strings, got {key!r}: {text!r}")
        if not _KEY.fullmatch(key):
            raise ValueError(f"a label selector must name labels like 'market' or 'ray.io/market-type', got {key!r}")
        try:
            parse_condition(text)
        except ValueError as error:
            raise ValueError(f"label {key!r}: {error}") from None


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels may take a bundle with this selector.

    Every condition must hold. A label that the node does not have is none of any values: "!v" and "!in(a,b)" hold,
    "v" and "in(a,b)" do not. (So does Ray 2.60, tried.)

    >>> matches({"market": "!spot", "zone": "in(a,b)"}, {"zone": "b"})
    True
    """
    for key, text in selector.items():
        wanted, values = parse_condition(text)
        if (labels.get(key) in values) != wanted:
            return False
    return True
