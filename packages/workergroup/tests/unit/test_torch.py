# SPDX-License-Identifier: Apache-2.0
"""The network interface of the torch helpers, without Ray; skipped without torch."""

import pytest

pytest.importorskip("torch", reason="the torch helpers need torch")

from fairlead_workergroup import torch as helpers


def test_interface_of_a_host_name():
    """A node may have the name of a host in place of an address, which is that of no interface."""
    assert helpers._interface_of("localhost") is None
    assert helpers._interface_of("127.0.0.1") is not None
