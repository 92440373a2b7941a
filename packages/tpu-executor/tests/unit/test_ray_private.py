# SPDX-License-Identifier: Apache-2.0
"""The uses of Ray that are not public; tests/ray/test_announcement.py has the other one."""

import ray

from fairlead_tpu_executor._ray_private import unwrap_remote


def function():
    """Do nothing."""


class Plain:
    """Has no methods."""


def test_what_is_under_ray_remote():
    """The function or class under `@ray.remote` and its options are read; anything else is returned as it is."""
    plain, options = unwrap_remote(ray.remote(num_cpus=2)(function))
    assert (plain, options["num_cpus"]) == (function, 2)
    assert unwrap_remote(function) == (function, {})
    plain, options = unwrap_remote(ray.remote(max_concurrency=2)(Plain))
    assert issubclass(plain, Plain)
    assert options["max_concurrency"] == 2
