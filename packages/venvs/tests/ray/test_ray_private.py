# SPDX-License-Identifier: Apache-2.0
"""Uses of Ray that are not public have a fallback."""

import pytest
import ray

from fairlead_venvs._cluster.rpc import alive_nodes
from fairlead_venvs._ray_private import draining_nodes, dumps_by_value

pytestmark = pytest.mark.usefixtures("local_ray")


def test_ray_reports_draining_nodes():
    """The installed Ray has the call."""
    assert hasattr(ray._private.state.state, "get_draining_nodes")
    assert draining_nodes() == frozenset()


def test_no_report_of_draining_nodes(monkeypatch):
    """Without the call, every node counts as alive."""
    monkeypatch.delattr(type(ray._private.state.state), "get_draining_nodes")
    assert draining_nodes() == frozenset()
    assert len(alive_nodes().labels) == len(ray.nodes())


def test_no_pickling_by_value(monkeypatch):
    """Without the private functions of cloudpickle, functions are pickled by reference."""

    def ours(module):
        return module == draining_nodes.__module__

    by_reference = ray.cloudpickle.dumps(draining_nodes)
    assert len(dumps_by_value(draining_nodes, ours)) > 2 * len(by_reference)
    monkeypatch.delattr(ray.cloudpickle.cloudpickle, "_dynamic_class_reduce")
    assert dumps_by_value(draining_nodes, ours) == by_reference
