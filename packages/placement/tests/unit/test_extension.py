# SPDX-License-Identifier: Apache-2.0
"""Logical nodes that are added: refusals before any request."""

import re

import pytest
import ray

from fairlead_placement import RayVirtualCluster


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ([[]], {}, "bundle_counts must be a list with an entry per logical node, got []"),
        ([2], {}, "bundle_counts must be a list with an entry per logical node, got 2"),
        ([[2, 0]], {}, "bundle counts must be integers, 1 or more, got 0 in [2, 0]"),
        ([[True]], {}, "bundle counts must be integers, 1 or more, got True in [True]"),
        ([[1]], {"timeout_s": -1}, "timeout_s must be a number of seconds, 0 or more and finite, got -1"),
        ([[1]], {"wait_for_nodes_s": "1"}, "wait_for_nodes_s must be a number of seconds, 0 or more and finite, got"),
    ],
)  # fmt: skip
def test_bad_arguments(arguments, options, message):
    """A bad argument is refused without a Ray, and the error shows it."""
    with pytest.raises(ValueError, match=re.escape(message)):
        RayVirtualCluster([1]).extend(*arguments, **options)
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_ids": [[0], [1]]}, "a cluster with gpu_ids cannot be extended: reserve another one"),
        ({"node_resource_constraints": [{"a": 1}, {"b": 1}]}, "node_resource_constraints differ between logical nodes"),
        ({"segment_size": 2}, "3 logical nodes in use are not a multiple of segment_size=2"),
    ],
)
def test_clusters_that_cannot_be_extended(options, message):
    """A cluster whose options do not say what a new logical node gets is refused without a Ray."""
    with pytest.raises(ValueError, match=re.escape(message)):
        RayVirtualCluster([1, 1], **options).extend([1, 1, 1])
    assert not ray.is_initialized()
