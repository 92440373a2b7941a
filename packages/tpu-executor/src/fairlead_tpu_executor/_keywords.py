# SPDX-License-Identifier: Apache-2.0
"""A keyword that an option does not have is answered with the one that was meant."""

import dataclasses
import difflib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["names_the_right_one"]

# What users of other libraries call things.
_SYNONYMS = {
    "tpu_type": "tpu_version",
    "accelerator_type": "tpu_version",
    "type": "tpu_version",
    "num_slices": "pod_count",
    "slices": "pod_count",
    "chips_per_host": "chips_per_vm",
    "num_cpus": "cpu_count",
    "runtime_env": "execution_env",
    "env_vars": 'execution_env={"env_vars": ...}',
    "timeout_s": "scale_timeout_s",
    "max_retries": "max_retries_failure",
    "num_gpus": "device_count",
    "num_workers": "worker_count",
    "coord_port": "megascale_port",
}
_Class = TypeVar("_Class", bound=type)


def names_the_right_one(cls: _Class) -> _Class:
    """An unknown keyword is a TypeError that says which one was meant."""
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]
    known = [one.name for one in sorted(dataclasses.fields(cls), key=lambda one: bool(one.kw_only))]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                meant = _SYNONYMS.get(name, "")
                if meant.partition("=")[0] not in known:
                    meant = next(iter(difflib.get_close_matches(name, known, n=1)), "")
                hint = f"did you mean {meant}?" if meant else f"it has {', '.join(known)}."
                raise TypeError(f"{cls.__name__} has no option {name!r}: {hint}")
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[misc]
    return cls
