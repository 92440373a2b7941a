# SPDX-License-Identifier: Apache-2.0
"""Where prompts come from: the reference of a prompt for each prompt id."""

import random
from array import array
from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["IndexStream", "PromptSource", "SequenceStream"]


class PromptSource(Protocol):
    """A stream of prompts that can be continued at a prompt id."""

    def get(self, prompt_id: int) -> Any:
        """Return the reference of the prompt at a prompt id, a JSON value of at most 4 KiB.

        A ledger asks for 0, 1, 2, and so on. It repeats a request that raised an error. Leases have lists in
        place of tuples.

        Raises:
            IndexError: The stream ends before this prompt id.
        """
        ...

    def state(self) -> bytes:
        """Return what `restore` needs beside the prompt id, or `b""`."""
        ...

    def restore(self, state: bytes, prompt_id: int) -> None:
        """Continue so that the next request is for `prompt_id`."""
        ...


class SequenceStream:
    """Read prompts from a sequence, once."""

    def __init__(self, prompts: Sequence[Any]) -> None:
        self.get = prompts.__getitem__

    def state(self) -> bytes:
        return b""

    def restore(self, state: bytes, prompt_id: int) -> None:
        pass


class IndexStream:
    """Return the indices of a dataset in another order in each epoch.

    The index is a function of the seed and the prompt id alone, so there is no state to save, and a restart with the
    same arguments continues the same stream.

    Args:
        size: the number of prompts in the dataset.
        seed: the seed of the order.
        epochs: the number of passes; None for no end.

    >>> stream = IndexStream(5, seed=0, epochs=2)
    >>> [sorted(stream.get(epoch * 5 + place) for place in range(5)) for epoch in range(2)]
    [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    """

    def __init__(self, size: int, *, seed: int, epochs: int | None = None) -> None:
        if size < 1 or (epochs is not None and epochs < 1):
            raise ValueError(f"size is {size} and epochs is {epochs}; both must be at least 1.")
        self._size, self._seed, self._epochs = size, seed, epochs
        self._epoch = -1  # that the order is of
        self._order = array("q")  # a fifth of the memory of a list of integers

    def get(self, prompt_id: int) -> int:
        """Return the index of the prompt at a prompt id."""
        epoch, place = divmod(prompt_id, self._size)
        if self._epochs is not None and epoch >= self._epochs:
            raise IndexError(f"The stream ends after {self._epochs} epochs of {self._size} prompts.")
        if epoch != self._epoch:
            self._order = array("q", range(self._size))
            random.Random(f"{self._seed}:{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._order[place]

    def state(self) -> bytes:
        """Return `b""`: there is no state."""
        return b""

    def restore(self, state: bytes, prompt_id: int) -> None:
        """Do nothing: the prompt id suffices."""
