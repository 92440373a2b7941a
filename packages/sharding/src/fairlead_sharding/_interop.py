# SPDX-License-Identifier: Apache-2.0
"""Conversions to and from plain data and the meshes of torch and jax. A conversion imports its library when called."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ._axes import as_int
from ._layout import IntArray, as_layout, make_layout


def to_dict(layout: IntArray, names: Sequence[str], start: int | None) -> dict[str, Any]:
    ranks = {"ranks": layout.ravel().tolist()} if start is None else {"start": start}
    return {"names": list(names), "shape": list(layout.shape), **ranks}


def from_dict(data: Mapping[str, Any]) -> tuple[IntArray, Sequence[str]]:
    try:
        shape = tuple(as_int(size, "A size in the shape", 1) for size in data["shape"])
        if "start" in data and "ranks" in data:
            raise ValueError("The dict of a sharding has start and ranks: give one of them.")
        if "start" in data:
            return make_layout(shape, as_int(data["start"], "The first rank", 0)), data["names"]
        return as_layout(data["ranks"]).reshape(shape), data["names"]
    except KeyError as missing:
        raise ValueError(f"The dict of a sharding lacks {missing}; it has {list(data)}.") from None
    except TypeError as error:
        raise ValueError(f"This is not the dict of a sharding ({error}): {data!r}") from None


def to_device_mesh(layout: IntArray, names: Sequence[str], device_type: str) -> Any:
    torch = _require("torch", "to_device_mesh")
    mesh = _require("torch.distributed.device_mesh", "to_device_mesh")
    return mesh.DeviceMesh(device_type, torch.tensor(layout.tolist()), mesh_dim_names=tuple(names))


def from_device_mesh(mesh: Any) -> tuple[object, Sequence[str]]:
    if not mesh.mesh_dim_names:
        raise ValueError(f"The mesh has no dimension names; make it with mesh_dim_names=(...): {mesh}")
    return mesh.mesh.tolist(), mesh.mesh_dim_names


def to_jax_mesh(layout: IntArray, names: Sequence[str], devices: Sequence[Any]) -> Any:
    jax_sharding = _require("jax.sharding", "to_jax_mesh")
    if (largest := layout.max()) >= len(devices):
        raise ValueError(f"Rank {largest} has no device: only {len(devices)} devices were given.")
    # Assigned one by one, because numpy would unpack a device that looks like a sequence.
    grid = np.empty(layout.shape, dtype=object)
    for position, rank in np.ndenumerate(layout):
        grid[position] = devices[int(rank)]
    return jax_sharding.Mesh(grid, tuple(names))


def _require(module: str, caller: str) -> Any:
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        message = f"{caller}() needs {library}, which cannot be imported ({error}): pip install {library}"
        raise ImportError(message, name=library) from error
