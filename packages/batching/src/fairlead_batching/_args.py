# SPDX-License-Identifier: Apache-2.0
"""How microbatches are to be made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, get_args

from ._checks import made_whole
from ._packing.packer import Algorithm, Packer

Args = TypeVar("Args", "DynamicBatchingArgs", "SequencePackingArgs")

MicrobatchOrder = Literal["packer", "largest_first"]
MICROBATCH_ORDERS: tuple[MicrobatchOrder, ...] = get_args(MicrobatchOrder)


@dataclass(frozen=True, kw_only=True)
class DynamicBatchingArgs:
    """Microbatches of padded sequences, cut by tokens instead of by samples.

    - max_tokens_per_microbatch: the padded length of a microbatch times its samples is never more;
    - sequence_length_round: padded lengths are multiples of it, except that none exceeds the tensor's own width;
    - input_key: the leaf with the sequences, (samples, width, ...);
    - input_lengths_key: the leaf with their lengths, (samples,), whole numbers.

    Raises:
        TypeError, ValueError: a number that is not whole, or below 1.

    >>> DynamicBatchingArgs(
    ...     max_tokens_per_microbatch=8, sequence_length_round=0, input_key="tokens", input_lengths_key="length"
    ... )
    Traceback (most recent call last):
    ValueError: sequence_length_round must be at least 1, got 0.
    """

    max_tokens_per_microbatch: int
    sequence_length_round: int
    input_key: str
    input_lengths_key: str

    def __post_init__(self) -> None:
        made_whole(self, "max_tokens_per_microbatch", "sequence_length_round")


@dataclass(frozen=True, kw_only=True)
class SequencePackingArgs:
    """Microbatches of sequences laid end to end: each microbatch is one bin.

    - max_tokens_per_microbatch: the tokens that a bin holds;
    - input_key, input_lengths_key: as in `DynamicBatchingArgs`;
    - algorithm: one of `get_packer`'s;
    - sequence_length_pad_multiple: each sequence takes up a multiple of so many tokens;
    - microbatch_order: ``packer``, as the algorithm gives them, or ``largest_first``: bins are dealt from the
      fullest on, so that all shards run their largest at the same time, and memory runs out at once or not at all.

    Raises:
        TypeError, ValueError: a number that is not whole, or below 1; an unknown algorithm or order.

    >>> packing = SequencePackingArgs(
    ...     max_tokens_per_microbatch=8,
    ...     input_key="tokens",
    ...     input_lengths_key="length",
    ...     algorithm="balanced",
    ...     sequence_length_pad_multiple=4,
    ... )
    >>> packing.microbatch_order
    'packer'
    """

    max_tokens_per_microbatch: int
    input_key: str
    input_lengths_key: str
    algorithm: Algorithm
    sequence_length_pad_multiple: int
    microbatch_order: MicrobatchOrder = "packer"

    def __post_init__(self) -> None:
        made_whole(self, "max_tokens_per_microbatch", "sequence_length_pad_multiple")
        Packer(self.algorithm, self.max_tokens_per_microbatch)
        if self.microbatch_order not in MICROBATCH_ORDERS:
            choices = ", ".join(MICROBATCH_ORDERS)
            raise ValueError(f"Unknown microbatch_order {self.microbatch_order!r}; there are: {choices}.")


def read(kind: type[Args], given: Args | Mapping[str, Any]) -> Args:
    """The arguments as their class; a mapping with the same names, such as one read from a file, is taken too."""
    if isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(f"Expected {kind.__name__} or a mapping with its fields, found {type(given).__name__}.")
    known = {field.name for field in fields(kind)}
    if unknown := set(given) - known:
        raise ValueError(f"Unknown keys for {kind.__name__}: {sorted(unknown)}; it has {sorted(known)}.")
    try:
        return kind(**given)
    except TypeError as error:
        raise ValueError(f"{kind.__name__} cannot be made of {dict(given)}: {error}") from error
