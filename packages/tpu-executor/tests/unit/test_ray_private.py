# SPDX-License-Identifier: Apache-2.0
"""The uses of Ray that are not public, and the fallback for a part that is missing."""

import ray

from fairlead_tpu_executor._ray_private import no_announcement, unwrap_remote


def function():
    """Do nothing."""


class Plain:
    """Has no methods."""


def test_announcements(monkeypatch):
    """The functions of Ray that announce a cluster are restored, and one that is missing is left out."""
    monkeypatch.delattr(ray._common.utils, "reset_ray_address")
    write = ray._private.utils.write_ray_address
    with no_announcement():
        assert ray._private.utils.write_ray_address is not write
        assert not hasattr(ray._common.utils, "reset_ray_address")
    assert ray._private.utils.write_ray_address is write
    assert not hasattr(ray._common.utils, "reset_ray_address")


def test_what_is_under_ray_remote():
    """The function or class under `@ray.remote` and its options are read; anything else is returned as it is."""
    plain, options = unwrap_remote(ray.remote(num_cpus=2)(function))
    assert (plain, options["num_cpus"]) == (function, 2)
    assert unwrap_remote(function) == (function, {})
    plain, options = unwrap_remote(ray.remote(max_concurrency=2)(Plain))
    assert issubclass(plain, Plain)
    assert options["max_concurrency"] == 2
