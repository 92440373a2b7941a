# SPDX-License-Identifier: Apache-2.0
"""Functions on nodes, without Ray."""

import threading

from fairlead_placement._nodes import functions


def test_a_slow_search_for_nodes(monkeypatch):
    """While the nodes of this machine are not found, functions run in tasks, with half of the time or more left."""
    over, left = threading.Event(), []

    def run_in_tasks(function, arguments, *, timeout_s):
        left.append(timeout_s)
        return {node_id: function(*args) for node_id, args in arguments.items()}

    monkeypatch.setattr(functions, "list_raylets", lambda: over.wait(60) and [])
    monkeypatch.setattr(functions, "run_in_tasks", run_in_tasks)
    try:
        assert functions.run_on_nodes(int, {"node": ("7",)}, timeout_s=1.0) == {"node": 7}
        assert left[0] > 0
    finally:
        over.set()
