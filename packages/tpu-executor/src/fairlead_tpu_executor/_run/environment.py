# SPDX-License-Identifier: Apache-2.0
"""The variables of each host. Pure: what the node provides < the user's < ours."""

from collections.abc import Mapping, Sequence

from .._accelerators.config import MEGASCALE_DEFAULT_PORT, AcceleratorConfigType, TpuAcceleratorConfig
from .._accelerators.slices import SliceInfo

__all__ = [
    "ENV_CALL_INDEX",
    "ENV_CALL_SLICE",
    "ENV_JOB_COORDINATOR_ADDRESS",
    "ENV_PROCESS_COUNT",
    "ENV_PROCESS_INDEX",
    "LOADER",
    "Variables",
    "host_environment",
    "megascale_port",
    "split_loader",
]

ENV_CALL_INDEX: str = "EXECUTOR_CALL_INDEX"
ENV_CALL_SLICE: str = "EXECUTOR_CALL_SLICE"
# Of all hosts of all slices, where the others count within a slice.
ENV_JOB_COORDINATOR_ADDRESS: str = "EXECUTOR_JOB_COORDINATOR_ADDRESS"
ENV_PROCESS_COUNT: str = "EXECUTOR_PROCESS_COUNT"
ENV_PROCESS_INDEX: str = "EXECUTOR_PROCESS_INDEX"
# With one slice none of these may be there, also not from the node: libtpu would wait for other slices.
_MEGASCALE = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_PORT", "MEGASCALE_SLICE_ID")
# Read by the loader or the interpreter before a line of ours runs: these need a new process.
LOADER = ("LD_", "PYTHON")

Variables = Mapping[str, str | None]
"""Values by name; None is a variable that must not be there."""


def host_environment(
    config: AcceleratorConfigType,
    slices: Sequence[SliceInfo],
    at: int,
    worker: int,
    *,
    coordinators: Sequence[str],
    megascale: str | None,
) -> dict[str, str | None]:
    """The user's variables and, above them, ours.

    Args:
        config: with the user's.
        slices: all that take part, in order.
        at: which of them.
        worker: which host of it.
        coordinators: `host:port` of worker 0 of each slice.
        megascale: `host:port` of the coordinator of all slices; None with one slice.
    """
    one = slices[at]
    ours: dict[str, str | None] = {
        ENV_CALL_INDEX: str(worker),
        ENV_CALL_SLICE: str(at),
        "EXECUTOR_NUM_HOSTS": str(one.num_hosts),
        "EXECUTOR_COORDINATOR_ADDRESS": coordinators[at],
        ENV_JOB_COORDINATOR_ADDRESS: coordinators[0],
        ENV_PROCESS_COUNT: str(sum(each.num_hosts for each in slices)),
        ENV_PROCESS_INDEX: str(sum(each.num_hosts for each in slices[:at]) + worker),
    }
    if isinstance(config, TpuAcceleratorConfig):
        ours |= {
            "TPU_HOST_ID": str(worker),
            "TPU_SLICE_NAME": one.slice_name,
            "TPU_VERSION": one.kind,
            "TPU_POD_COUNT": str(len(slices)),
            **dict.fromkeys(_MEGASCALE),
        }
    if megascale is not None:
        ours |= {
            "MEGASCALE_COORDINATOR_ADDRESS": megascale,
            "MEGASCALE_NUM_SLICES": str(len(slices)),
            "MEGASCALE_PORT": megascale.rpartition(":")[2],
            "MEGASCALE_SLICE_ID": str(at),
        }
    return {**split_loader(config.env_vars)[0], **ours}


def split_loader(env_vars: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(variables that a running process can be given, those that only a new one takes note of)."""
    loader = {name: value for name, value in env_vars.items() if name.startswith(LOADER)}
    return {name: value for name, value in env_vars.items() if name not in loader}, loader


def megascale_port(config: AcceleratorConfigType, driver: Mapping[str, str]) -> int:
    """The configuration's; else `COORD_PORT` of the user's variables or of the driver; else 8081.

    Raises:
        ValueError: a `COORD_PORT` that is no port.
    """
    if isinstance(config, TpuAcceleratorConfig) and config.megascale_port is not None:
        return config.megascale_port
    text = config.env_vars.get("COORD_PORT") or driver.get("COORD_PORT") or str(MEGASCALE_DEFAULT_PORT)
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise ValueError(f"COORD_PORT is a port, 1 to 65535, got {text!r}")
    return int(text)
