# SPDX-License-Identifier: Apache-2.0
"""The extension of worker groups that keeps their timelines; the entry point of this package names `extend`."""

from fairlead_workergroup import GroupHandle, RayWorkerGroup
from fairlead_workergroup.spi import observe_calls, on_worker_start, publication_of

from ._remote.ring import start_rings
from ._requests import RequestLog
from ._timeline import Timeline, read_timeline
from ._trace import TraceSaver


def extend(group: RayWorkerGroup | GroupHandle, group_id: str) -> None:
    """Keep the timeline of a group from its start. Calls of handles are not logged: readers find those of the owner."""
    read_group = publication_of(group)

    def read() -> Timeline:
        return read_timeline(read_group())

    if isinstance(group, RayWorkerGroup):
        observe_calls(group, RequestLog(group_id, read))
        on_worker_start(group, start_rings)
    else:
        observe_calls(group, TraceSaver(read))
