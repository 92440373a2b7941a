# SPDX-License-Identifier: Apache-2.0
"""The facts that a group publishes on its board: names, places, processes, and never the user's values."""

import time
from collections.abc import Mapping
from typing import Any, Protocol

import ray

from fairlead_placement.extension import await_published, publish, withdraw

from .._model import GroupState, Member, Place

# Of the published data; readers of another version leave the group out.
SCHEMA = 3
KEY = "fairlead-group-"


def actor_name(place: Place, token: str, incarnation: int) -> str:
    """Return a name that no other actor has: prefixes, slot numbers and ranks may repeat, so it holds the token."""
    return f"{place.name}-{token[:6]}-{place.rank}-{incarnation}"


class Published(Protocol):
    """A group, as far as it is published."""

    name_prefix: str
    now: GroupState


class Registration:
    """Keeps what is published about one group up to date."""

    def __init__(self, group: Published, token: str, class_name: str, *, methods: Mapping[str, Any]) -> None:
        self._group = group
        self.key: str = KEY + token
        self.version = 0
        context = ray.get_runtime_context()
        self._about: dict[str, Any] = {
            "schema": SCHEMA,
            "id": token,
            "name": group.name_prefix,
            "class": class_name,
            "methods": methods,
            "created": time.time(),
            "namespace": context.namespace,
            "driver": {
                "job_id": context.get_job_id(),
                "worker_id": context.get_worker_id(),
                "node_id": context.get_node_id(),
            },
        }

    def publish(self, starting: Mapping[int, Member]) -> None:
        """Publish the present workers, and those starting in place of some; do not wait for the board."""
        now = self._group.now
        rows = [_make_row(starting.get(member.rank, member)) for member in now.members]
        self.version += 1
        axes = {"shape": dict(now.sharding.shape), "layout": now.sharding.to_dict()}
        about = {**self._about, **axes, "epoch": now.group_epoch, "publication": self.version}
        publish(self.key, self.version, {**about, "members": rows})

    def await_handles(self, timeout_s: float) -> None:
        """Wait until the handles of other processes learn what is published, or until the timeout."""
        await_published(self.key, timeout_s=timeout_s)

    def withdraw(self) -> None:
        """Withdraw everything, without waiting for the board."""
        withdraw(self.key)


def _make_row(member: Member) -> dict[str, Any]:
    return {
        "rank": member.rank,
        "name": member.place.name,
        "coords": dict(member.coords),
        "node_id": member.node_id,
        "address": member.place.slot.node_ip,
        "pid": member.pid,
        "started": member.started,
        "incarnation": member.incarnation,
        "restarts": member.restarts,
        "actor_id": member.actor_id,
        "mark": member.mark,
        "actor_name": member.actor_name,
        "tied_rank": member.place.tied_rank,
    }
