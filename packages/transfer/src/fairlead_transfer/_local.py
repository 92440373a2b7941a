# SPDX-License-Identifier: Apache-2.0
"""A tensor of a user's own sharding, as a worker method returns it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LocalTensor:
    """The box of a tensor that this rank holds, for anything that is neither replicated nor a DTensor.

    A worker whose Python lacks this package may return any object with these three attributes.

    Attributes:
        tensor: the local part, a numpy array or a torch tensor.
        global_shape: the shape of the whole tensor.
        offsets: the first index of the local part in each dim.
    """

    tensor: Any
    global_shape: Sequence[int]
    offsets: Sequence[int]
