# SPDX-License-Identifier: Apache-2.0
"""The facts that a group publishes on its board: names, places, processes, and never the user's values."""

import time
from collections.abc import Mapping
from typing import Any

import ray

from fairlead_placement.extension import await_published, publish, withdraw

from .._membership.model import Member, Place, make_process
from .._membership.roster import Roster
from .._ray_private import actor_id_of
from .._remote.process import mark_of

# Of the published data; readers of another version leave the group out.
SCHEMA = 3
KEY = "fairlead-group-"


def actor_name(place: Place, token: str, incarnation: int) -> str:
    """Return a name that no other actor has: prefixes, slot numbers and ranks may repeat, so it holds the token."""
    return f"{place.name}-{token[:6]}-{place.rank}-{incarnation}"


class Registration:
    """Keeps what is published about one group up to date."""

    def __init__(self, roster: Roster, token: str, class_name: str, *, methods: Mapping[str, Any]) -> None:
        self._roster = roster
        self.key: str = KEY + token
        self._token = token
        self.version = 0
        context = ray.get_runtime_context()
        self._about: dict[str, Any] = {
            "schema": SCHEMA,
            "id": token,
            "name": roster.name_prefix,
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

    def publish(self, starting: Mapping[int, Any] | None = None) -> None:
        """Publish the present workers, and those starting without their processes; do not wait for the board."""
        now = self._roster.now
        rows = [self._row(member, (starting or {}).get(member.rank)) for member in now.members]
        self.version += 1
        axes = {"shape": dict(now.sharding.shape), "layout": now.sharding.to_dict()}
        about = {**self._about, **axes, "epoch": now.epoch, "publication": self.version}
        publish(self.key, self.version, {**about, "members": rows})

    def await_handles(self, timeout_s: float) -> None:
        """Wait until the handles of other processes learn what is published, or until the timeout."""
        await_published(self.key, timeout_s=timeout_s)

    def _row(self, member: Member, actor: Any) -> dict[str, Any]:
        process = (
            make_process(member.place, member.coords) if actor is not None or member.handle is None else member.process
        )
        handle = member.handle if actor is None else actor
        actor_id = "" if handle is None else actor_id_of(handle)
        return {
            "rank": member.rank,
            "name": member.place.name,
            "coords": dict(member.coords),
            "node_id": process.node_id,
            "address": process.node_ip,
            "pid": process.pid,
            "started": process.started,
            "incarnation": member.incarnation,
            "restarts": member.restarts,
            "actor_id": actor_id,
            "mark": mark_of(self._token, member.rank),
            "actor_name": actor_name(member.place, self._token, member.incarnation),
            "tied_rank": member.place.tied_rank,
        }

    def withdraw(self) -> None:
        """Withdraw everything, without waiting for the board."""
        withdraw(self.key)
