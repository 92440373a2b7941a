# SPDX-License-Identifier: Apache-2.0
"""Meshes of other libraries. Each is imported when its conversion is called, never before."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._layout import IntArray


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
    # Element by element: numpy would take a device that looks like a sequence apart.
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
