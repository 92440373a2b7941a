# SPDX-License-Identifier: Apache-2.0
"""What `device_remote` gives, to a type checker: it makes one thing of a class and another of a function."""

from typing import TYPE_CHECKING, Protocol, overload

from ._run.work import Class, Function

if TYPE_CHECKING:
    from ._device import DeviceClass, DeviceFunction

__all__ = ["DeviceDecorator"]


class DeviceDecorator(Protocol):
    """A class becomes a `DeviceClass`, a function a `DeviceFunction`."""

    @overload
    def __call__(self, target: Class, /) -> "DeviceClass": ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, target: Function, /) -> "DeviceFunction": ...
