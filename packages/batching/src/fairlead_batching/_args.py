# SPDX-License-Identifier: Apache-2.0
"""Arguments: how microbatches are made, and the checks that several modules share."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

Algorithm = Literal[
    "balanced",
    "concatenative",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "modified_first_fit_decreasing",
]
MicrobatchOrder = Literal["packer", "largest_first"]
Cost = tuple[float, float]  # a and b of a * length + b * length**2


def as_int(name: str, value: Any, *, at_least: int) -> int:
    """Return ``value`` as an int; TypeError if it is not a whole number, ValueError if it is less than ``at_least``."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {value!r}.") from None
    if number < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {number}.")
    return number


def convert_fields(frozen: Any, *names: str, at_least: int = 1) -> None:
    """Convert fields of a frozen dataclass to ints: arithmetic on numbers of few bits would overflow."""
    for name in names:
        object.__setattr__(frozen, name, as_int(name, getattr(frozen, name), at_least=at_least))


def check_cost(cost: Cost | None) -> None:
    """Refuse anything but None, or two finite coefficients of at least 0 of which one is positive."""
    if cost is None:
        return
    try:
        usable = len(cost) == 2 and all(math.isfinite(part) and part >= 0 for part in cost) and any(cost)
    except TypeError:
        usable = False
    if not usable:
        raise ValueError(
            f"cost must be two finite numbers (a, b) of at least 0, for a * length + b * length**2, of which one is "
            f"positive; got {cost!r}."
        )


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"Unknown {name} {value!r}; there are: {', '.join(choices)}.")


def convert_algorithm(frozen: Any) -> None:
    """Convert the field ``algorithm`` of a frozen dataclass to small letters; ValueError if it is unknown."""
    algorithm = str(frozen.algorithm).lower()
    check_choice("packing algorithm", algorithm, get_args(Algorithm))
    object.__setattr__(frozen, "algorithm", algorithm)


@dataclass(frozen=True, kw_only=True)
class DynamicBatchingArgs:
    """Microbatches of padded sequences, cut by tokens instead of by samples.

    - max_tokens_per_microbatch: the limit of the padded length of a microbatch times its samples;
    - sequence_length_round: padded lengths are multiples of it, but never exceed the width of the tensor;
    - input_key: the leaf with the sequences, (samples, width, ...);
    - input_lengths_key: the leaf with their lengths, (samples,), whole numbers;
    - cost: ``(a, b)`` for a cost of ``a * length + b * length**2`` of a sequence. Samples of similar length are then
      dealt, the most expensive to the cheapest rank so far. The microbatches have the same shapes as without.

    Raises:
        TypeError: a number is not whole.
        ValueError: a number is less than 1, or ``cost`` is not two numbers of at least 0.
    """

    max_tokens_per_microbatch: int
    sequence_length_round: int
    input_key: str
    input_lengths_key: str
    cost: Cost | None = None

    def __post_init__(self) -> None:
        convert_fields(self, "max_tokens_per_microbatch", "sequence_length_round")
        check_cost(self.cost)


@dataclass(frozen=True, kw_only=True)
class SequencePackingArgs:
    """Microbatches of concatenated sequences: each microbatch is one bin.

    - max_tokens_per_microbatch: the number of tokens that a bin holds;
    - input_key, input_lengths_key: as in `DynamicBatchingArgs`;
    - algorithm: one of the algorithms of `get_packer`, in small letters or capitals;
    - sequence_length_pad_multiple: each sequence takes up a multiple of this number of tokens;
    - microbatch_order: ``packer`` or None, the order of the algorithm, or ``largest_first``: bins are dealt to the
      shards from the fullest to the emptiest. Then all shards run their largest bin at the same time, so a bin that is
      too large for the memory fails in the first microbatch;
    - cost: as in `DynamicBatchingArgs`. Samples are then dealt, the most expensive to the cheapest shard so far, each
      shard packs its own, and runs its most expensive bin first. Where this needs more bins than without a cost, or a
      more expensive shard, the bins are those without a cost.

    Raises:
        TypeError, ValueError: as in `DynamicBatchingArgs`; or the algorithm or the order is unknown.
    """

    max_tokens_per_microbatch: int
    input_key: str
    input_lengths_key: str
    algorithm: Algorithm
    sequence_length_pad_multiple: int
    microbatch_order: MicrobatchOrder | None = "packer"
    cost: Cost | None = None

    def __post_init__(self) -> None:
        convert_fields(self, "max_tokens_per_microbatch", "sequence_length_pad_multiple")
        convert_algorithm(self)
        if self.microbatch_order is not None:
            check_choice("microbatch_order", self.microbatch_order, get_args(MicrobatchOrder))
        check_cost(self.cost)


MicrobatchArgs = DynamicBatchingArgs | SequencePackingArgs


def read_args(
    dynamic: DynamicBatchingArgs | Mapping[str, Any] | None, packing: SequencePackingArgs | Mapping[str, Any] | None
) -> MicrobatchArgs | None:
    """Return the arguments that were given, also if they are a mapping with the names of the fields."""
    if dynamic is not None and packing is not None:
        raise ValueError("dynamic_batching_args and sequence_packing_args were both given: choose one.")
    given, kind = (dynamic, DynamicBatchingArgs) if packing is None else (packing, SequencePackingArgs)
    if given is None or isinstance(given, kind):
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
