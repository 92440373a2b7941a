# SPDX-License-Identifier: Apache-2.0
"""A worker that does nothing, in a module that imports nothing: a worker by hand must not wait for our imports."""


class Worker:
    """A worker that does nothing."""

    def nothing(self) -> None:
        return None
