# SPDX-License-Identifier: Apache-2.0
"""The nodes of a request, without Ray."""

import ray

from fairlead_venvs._cluster import rpc
from fairlead_venvs._cluster.rpc import Nodes


def test_nodes_that_left_meanwhile(monkeypatch, caplog):
    """A node that drained and is gone is left out like one that still drains; one that the caller named is not."""
    monkeypatch.setattr(rpc, "draining_nodes", lambda: frozenset({"b"}))
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": node, "Alive": node != "c"} for node in "abc"])
    labels = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}
    assert Nodes(labels, given=False).without_draining().labels == {"a": "10.0.0.1"}
    assert "Skipped 10.0.0.2, 10.0.0.3: draining and lost nodes start no tasks." in caplog.text
    del labels["b"]
    assert Nodes(labels, given=True).without_draining().labels == labels
