# SPDX-License-Identifier: Apache-2.0
"""Uses of Ray that are not public have a fallback."""

import sys

import pytest
import ray

from fairlead_venvs import VenvSpec, create_local_venv_on_each_node
from fairlead_venvs._ray_private import draining_nodes, is_client

pytestmark = pytest.mark.usefixtures("local_ray")


def test_ray_reports_draining_nodes():
    """The installed Ray has the call."""
    assert hasattr(ray._private.state.state, "get_draining_nodes")
    assert draining_nodes() == frozenset()


def test_no_report_of_draining_nodes(monkeypatch):
    """Without the call, every node counts as alive."""
    monkeypatch.delattr(type(ray._private.state.state), "get_draining_nodes")
    assert create_local_venv_on_each_node(VenvSpec(requirements=[]))


def test_no_ray_client(monkeypatch):
    """Without this part of Ray, no connection counts as one of Ray Client."""
    assert is_client() is False
    monkeypatch.setitem(sys.modules, "ray.util.client", None)
    assert is_client() is False
