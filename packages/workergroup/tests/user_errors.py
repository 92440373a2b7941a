# SPDX-License-Identifier: Apache-2.0
"""Exceptions of users that pickle cannot copy."""


class TwoArgumentsError(Exception):
    """An exception that cannot be made from its `args`, as pickle does it."""

    def __init__(self, code, *, where):
        super().__init__(f"code {code} at {where}")
        self.code = code


class PrefixError(ValueError):
    """An exception that is made from its `args` without an error, but with another text."""

    def __init__(self, code):
        super().__init__(f"failed with {code}")
        self.code = code


class HoldingError(OSError):
    """An exception with arguments and attributes that cannot be pickled."""

    def __init__(self, text, lock):
        super().__init__(text, lock)
        self.text, self.lock = text, lock


class NewError(Exception):
    """An exception whose own `__new__` takes other arguments too."""

    def __new__(cls, code, *, where):
        return super().__new__(cls, code)

    def __init__(self, code, *, where):
        super().__init__(f"{code} at {where}")


class StubbornError(Exception):
    """An exception that cannot be made without `__init__` either."""

    def __setstate__(self, state):
        raise RuntimeError("no")

    def __init__(self, code, *, where):
        super().__init__(code)
        self.where = where
