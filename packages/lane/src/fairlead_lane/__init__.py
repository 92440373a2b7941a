# SPDX-License-Identifier: Apache-2.0
"""Messages between the driver and the workers of a group of fairlead-workergroup, for calls of microseconds.

Users open a lane by `RayWorkerGroup.lane`.
"""

import importlib.util

import ray

from fairlead_workergroup.exceptions import LaneError
from fairlead_workergroup.spi import Site, Transport

from ._router import Router
from ._transport import Lane
from ._worker.overlap import serve_overlapping
from ._worker.serve import serve

__all__ = ["make_lane"]
__version__ = "0.1.0"


def make_lane(site: Site) -> Transport:
    """Return a lane of a group, whose workers do not serve it yet.

    Args:
        site: the group.

    Raises:
        LaneError: pyzmq is not installed, or the lane cannot listen at its port.
    """
    if importlib.util.find_spec("zmq") is None:
        raise LaneError(
            "A lane needs pyzmq, which is not installed here. Install fairlead-workergroup[lane], and pyzmq in the "
            "Python of the workers if they have one of their own."
        )
    lease = site.lease_port()
    try:
        code = ray.put(ray.cloudpickle.dumps(serve_overlapping if site.overlaps else serve))
        router = Router(lease.address, lease.port)
        return Lane(site, router, lease.release, code, node_id=ray.get_runtime_context().get_node_id())
    except BaseException:
        lease.release()
        raise
