# SPDX-License-Identifier: Apache-2.0
"""The names of the ways to compress gradients; what they do is in `torch`."""

from typing import Literal, get_args

__all__ = ["COMPRESSIONS", "Compression", "check_compression"]

Compression = Literal["fp16", "bf16", "powersgd"]
COMPRESSIONS: tuple[Compression, ...] = get_args(Compression)


def check_compression(wanted: bool | Compression) -> Compression | None:
    """A way to compress gradients: True stands for "fp16", False for none.

    Raises:
        ValueError: there is no such way.
    """
    if wanted is False:
        return None
    if wanted is True:
        return "fp16"
    if wanted not in COMPRESSIONS:
        raise ValueError(f"gradient compression is True, False or one of {list(COMPRESSIONS)}, got {wanted!r}")
    return wanted
