# SPDX-License-Identifier: Apache-2.0
"""The public packer."""

from collections.abc import Iterable
from dataclasses import dataclass

from .._args import Algorithm, convert_algorithm, convert_fields
from .._leaves.operations import to_integers
from . import algorithms
from .algorithms import Bins


def get_packer(
    algorithm: Algorithm,
    bin_capacity: int,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
    *,
    seed: int = 0,
) -> "Packer":
    """Return a packer of sequences into bins of ``bin_capacity`` tokens.

    Args:
        algorithm: one of these, in small letters or capitals:

            - ``concatenative``: in the given order, next-fit;
            - ``first_fit_decreasing``: the longest first, each into the first bin with room;
            - ``first_fit_shuffle``: the same in an order shuffled by ``seed``;
            - ``modified_first_fit_decreasing``: another name of ``first_fit_decreasing``, from NeMo RL;
            - ``balanced``: as few bins as it finds, and for that number the smallest largest bin that it finds (the
              differencing method of Karmarkar and Karp, 1982), so that all ranks finish at the same time.

        min_bin_count: the least number of bins; 0 is the same as None.
        bin_count_multiple: the number of bins is a multiple of this number.
        seed: the seed of ``first_fit_shuffle``; the others ignore it.

    Raises:
        TypeError: a number is not whole.
        ValueError: the algorithm is unknown, or a number is too small.

    >>> lengths = [7, 2, 6, 4, 3]
    >>> get_packer("first_fit_decreasing", bin_capacity=10).pack(lengths)
    [[0, 4], [2, 3], [1]]

    Three bins are needed. If their number has to be a multiple of two, the fullest is halved:

    >>> get_packer("first_fit_decreasing", bin_capacity=10, bin_count_multiple=2).pack(lengths)
    [[2, 3], [1], [0], [4]]
    """
    return Packer(algorithm, bin_capacity, min_bin_count, bin_count_multiple, seed)


@dataclass(frozen=True)
class Packer:
    """An algorithm and its bounds, made by `get_packer`. The same lengths always give the same bins.

    - algorithm, bin_capacity, min_bin_count, bin_count_multiple, seed: the arguments of `get_packer`, which also lists
      the errors.
    """

    algorithm: Algorithm
    bin_capacity: int
    min_bin_count: int | None = None
    bin_count_multiple: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        convert_algorithm(self)
        if isinstance(self.min_bin_count, bool):  # which NeMo RL's get_packer has in this place
            raise TypeError(
                f"min_bin_count must be a whole number, got {self.min_bin_count}. There is no collect_metrics."
            )
        convert_fields(self, "bin_capacity")
        for name, least in (("min_bin_count", 0), ("bin_count_multiple", 1)):
            if getattr(self, name) is not None:
                convert_fields(self, name, at_least=least)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed must be a whole number of at least 0, got {self.seed!r}.")

    def pack(self, sequence_lengths: Iterable[int]) -> Bins:
        """Return bins as lists of indices into the lengths: every index once, no bin empty or over its capacity.

        Raises:
            ValueError: a length is negative or larger than a bin, or there are fewer sequences than requested bins.

        >>> get_packer("concatenative", bin_capacity=10).pack([7, 2, 6, 4, 3])
        [[0, 1], [2, 3], [4]]
        """
        numbers = to_integers("sequence_lengths", sequence_lengths)
        if not numbers.size:
            self._round_up(0, 0)  # refuses a least number of bins
            return []
        if (longest := int(numbers.max())) > self.bin_capacity:
            index = int(numbers.argmax())
            raise ValueError(
                f"Sequence {index} has {longest} tokens, and a bin holds {self.bin_capacity}: "
                f"truncate it, leave it out, or use larger bins."
            )
        if (shortest := int(numbers.min())) < 0:
            raise ValueError(f"Sequence {int(numbers.argmin())} has a negative length: {shortest}.")
        given: list[int] = numbers.tolist()
        if self.algorithm == "balanced":
            return algorithms.balanced(given, self.bin_capacity, lambda count: self._round_up(count, len(given)))
        seed = (self.seed,) if self.algorithm == "first_fit_shuffle" else ()
        bins = getattr(algorithms, self.algorithm)(given, self.bin_capacity, *seed)
        return algorithms.split_to(bins, given, self._round_up(len(bins), len(given)))

    def _round_up(self, needed: int, available: int) -> int:
        """Return the least number of bins that is at least ``needed`` and fulfils the arguments."""
        multiple = self.bin_count_multiple or 1
        count = -(-max(needed, self.min_bin_count or 0) // multiple) * multiple
        if count > available:
            raise ValueError(
                f"{available} sequences cannot fill {count} bins without leaving one empty (needed for the tokens: "
                f"{needed}, min_bin_count={self.min_bin_count}, bin_count_multiple={self.bin_count_multiple})."
            )
        return count
