# SPDX-License-Identifier: Apache-2.0
"""The environment variables of each host: our values over the user's, and these over the node's. Pure."""

from collections.abc import Mapping

from .._accelerators.config import AcceleratorConfigType, TpuAcceleratorConfig
from .._reserve.reservation import Snapshot

ENV_CALL_INDEX: str = "EXECUTOR_CALL_INDEX"
ENV_CALL_SLICE: str = "EXECUTOR_CALL_SLICE"
# These three count all hosts of all slices; the other variables count within a slice.
ENV_JOB_COORDINATOR_ADDRESS: str = "EXECUTOR_JOB_COORDINATOR_ADDRESS"
ENV_PROCESS_COUNT: str = "EXECUTOR_PROCESS_COUNT"
ENV_PROCESS_INDEX: str = "EXECUTOR_PROCESS_INDEX"
# With one slice none of these may be set, not even by the node: libtpu would wait for other slices.
_MEGASCALE = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_PORT", "MEGASCALE_SLICE_ID")
# The loader and the interpreter read these before any of our code runs, so they need a new process.
_STARTUP_PREFIXES = ("LD_", "PYTHON")


def host_environment(config: AcceleratorConfigType, held: Snapshot, at: int, worker: int) -> dict[str, str | None]:
    """Return the variables of a host by name; None marks a variable to remove.

    Args:
        config: the configuration, with the user's variables.
        held: the slices and ports of the run.
        at: the number of the host's slice.
        worker: the TPU worker id of the host.
    """
    slices, one = held.slices, held.slices[at]
    ours: dict[str, str | None] = {
        ENV_CALL_INDEX: str(worker),
        ENV_CALL_SLICE: str(at),
        "EXECUTOR_NUM_HOSTS": str(one.num_hosts),
        "EXECUTOR_COORDINATOR_ADDRESS": held.coordinators[at],
        ENV_JOB_COORDINATOR_ADDRESS: held.coordinators[0],
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
    if held.megascale is not None:
        port = held.megascale.rpartition(":")[2]
        ours |= dict(zip(_MEGASCALE, (held.megascale, str(len(slices)), port, str(at)), strict=True))
    return {**split_startup_variables(config.env_vars)[0], **ours}


def split_startup_variables(env_vars: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables that a running process can set, and those that take effect only in a new process."""
    startup = {name: value for name, value in env_vars.items() if name.startswith(_STARTUP_PREFIXES)}
    return {name: value for name, value in env_vars.items() if name not in startup}, startup
