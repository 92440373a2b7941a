# SPDX-License-Identifier: Apache-2.0
"""Exceptions as users write them, which pickle cannot copy."""


class TwoArgumentsError(Exception):
    """Cannot be made from its `args`, as pickle does it."""

    def __init__(self, code, *, where):
        super().__init__(f"code {code} at {where}")
        self.code = code


class PrefixError(ValueError):
    """Is made from its `args` without an error, with another text."""

    def __init__(self, code):
        super().__init__(f"failed with {code}")
        self.code = code


class HoldingError(OSError):
    """Holds what does not pickle, in its arguments and its attributes."""

    def __init__(self, text, lock):
        super().__init__(text, lock)
        self.text, self.lock = text, lock


class NewError(Exception):
    """Its own `__new__` wants other arguments too."""

    def __new__(cls, code, *, where):
        return super().__new__(cls, code)

    def __init__(self, code, *, where):
        super().__init__(f"{code} at {where}")


class StubbornError(Exception):
    """Does not let itself be made without `__init__` either."""

    def __setstate__(self, state):
        raise RuntimeError("no")

    def __init__(self, code, *, where):
        super().__init__(code)
        self.where = where
