# SPDX-License-Identifier: Apache-2.0
"""The end of a group whose node has lost its raylet."""

import os
import signal
import time

import pytest

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import RayWorkerGroup


class Worker:
    pass


@pytest.mark.nightly
def test_deadline_of_a_shutdown_without_a_raylet(raylets):
    """`shutdown(timeout=...)` returns by its deadline, also after the raylet of the workers was killed."""
    quiet = {"logging_level": "error", "log_to_driver": False}
    with raylets({"num_cpus": 0}, [{"num_cpus": 2}], **quiet) as nodes:
        reserved = RayVirtualCluster([2], use_gpus=False)
        group = RayWorkerGroup(reserved, Worker)
        (node,) = nodes.worker_nodes
        os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        began = time.monotonic()
        group.shutdown(timeout=8)
        assert time.monotonic() - began < 10
