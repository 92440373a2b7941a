# SPDX-License-Identifier: Apache-2.0
"""Finds the Ray cluster that this process may attach to: one that was named, announced, or started by `init_ray`."""

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from ._ray_private import Raylet, cluster_file, is_client, list_raylets
from .exceptions import PlacementError

# A cluster that `init_ray` started has a resource of this name, followed by a hash of the session folder and one of
# the visible devices.
TAG = "fairlead-local-"
_REMEDY = (
    "Run the driver on a node of the cluster, with address='host:port' of the cluster's head, or submit it as a job "
    "with `ray job submit`."
)


@dataclass(frozen=True)
class Target:
    """A running cluster to attach to.

    `reason` is the end of a sentence that begins with "the Ray cluster at ADDRESS, which". `advice` is what else to do
    if it does not answer, as a clause that a further one follows.
    """

    address: str
    reason: str
    advice: str = ""
    is_named: bool = False


def local_tag() -> str:
    """Return the name of the resource that marks a cluster that `init_ray` starts in this process."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    return f"{_session_tag()}{_hash(devices)}"


def _session_tag() -> str:
    """Return the part of the tag that this user's clusters with the same session folder share."""
    file = cluster_file()
    folder = os.environ.get("RAY_TMPDIR", "") if file is None else Path(file).parent.resolve()
    return f"{TAG}{_hash(f'{os.getuid()} {folder}')}-"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def find_target(named: str | None, *, private: bool = False) -> Target | None:
    """Return the cluster to attach to, or None if this process is to start one. `named` is the `address` of `init_ray`.

    With `private`, "auto" also takes the only cluster here that a program of this user has started for itself.
    """
    from_env = os.environ.get("RAY_ADDRESS") or None
    reason = "`address` names"
    if named in (None, "auto") and from_env not in (None, "auto"):
        if from_env == "local":
            if named is None:
                return None
            raise PlacementError("RAY_ADDRESS is 'local', which names no running cluster. Pass the address of one.")
        named, reason = from_env, "RAY_ADDRESS names"
    named = from_env if named is None else named
    if named in (None, "auto") and (announced := _read_announcement()):
        address, file, uid = announced
        if uid == os.getuid() and answers(address):
            reason = f"`ray start` announced in {file}"
            return Target(address, reason, f"delete {file} if that cluster has stopped, ")
    if named is None:
        started = _list_started(local_tag())
        return _make_target(started[-1]) if started else None
    if named == "auto":
        return _find_only_one(private=private)
    if "://" in named:  # Ray connects to any such address through Ray Client.
        raise PlacementError(
            f"{named!r} is an address of Ray Client, which Fairlead does not support. {_REMEDY} Correct the address, "
            "or RAY_ADDRESS."
        )
    if not answers(named):
        raise PlacementError(
            f"No Ray cluster answers at {named}. Start one with `ray start --head`, or correct the address (also "
            "RAY_ADDRESS)."
        )
    return Target(named, reason, "correct the address, ", is_named=True)


def refuse_client() -> None:
    """Raise a PlacementError if this process is connected to Ray through Ray Client."""
    if is_client():
        raise PlacementError(
            f"This process is connected to Ray through Ray Client, which Fairlead does not support. {_REMEDY}"
        )


def _split(address: str) -> tuple[str, int] | None:
    """Return the host and the port of an address, or None if it is none."""
    host, _, port = address.rpartition(":")
    if not host or not host.isprintable() or not port.isdecimal() or int(port) > 65535:
        return None
    return host.strip("[]"), int(port)


def answers(address: str) -> bool:
    """Return whether anything listens at an address; a ValueError if it is none. Ray itself tries for minutes."""
    if (place := _split(address)) is None:
        raise ValueError(f"address must be 'host:port', 'auto' or 'local', got {address!r}")
    try:
        with socket.create_connection(place, timeout=5.0):
            return True
    except OSError:
        return False


def _read_announcement() -> tuple[str, str, int] | None:
    """Return the address that `ray start` has announced on this machine, its file, and the owner of that."""
    file = cluster_file()
    try:
        with open(file or "", encoding="utf-8") as opened:
            uid, address = os.fstat(opened.fileno()).st_uid, opened.read(300).strip()
    except (OSError, UnicodeDecodeError):
        return None
    return (address, file or "", uid) if _split(address) else None


def describe_foreign_announcement() -> str:
    """Return a clause about a cluster that another user has announced here and that is not followed, or ""."""
    address, file, uid = _read_announcement() or ("", "", os.getuid())
    if uid == os.getuid():
        return ""
    return (
        f"{file} announces one at {address}, but belongs to another user (uid {uid}); to attach to that one, pass "
        f"address={address!r} or set RAY_ADDRESS"
    )


def _make_target(raylet: Raylet) -> Target:
    return Target(raylet.address, f"init_ray started in process {raylet.starter}")


def _list_started(prefix: str) -> list[Raylet]:
    """Return a raylet of each cluster that answers and has a resource with a prefix, the oldest first."""
    tagged = {one.address: one for one in list_raylets() if any(name.startswith(prefix) for name in one.resources)}
    return sorted((one for one in tagged.values() if answers(one.address)), key=lambda one: one.started_at)


def _find_only_one(*, private: bool) -> Target:
    started = _list_started(_session_tag())
    if len(started) == 1:
        return _make_target(started[0])
    if started:
        raise PlacementError(
            f"init_ray started several Ray clusters on this machine: {_describe(started)}. Pass the address of one of "
            "them, or set RAY_ADDRESS."
        )
    others = _list_started("")
    if private and len(others) == 1:
        return Target(others[0].address, f"process {others[0].starter} started for itself")
    theirs = (
        f" These clusters of yours are private to the programs that started them: {_describe(others)}. Pass the "
        "address of one of them to attach to it."
        if others
        else ""
    )
    foreign = describe_foreign_announcement()
    raise PlacementError(
        "No Ray cluster was named or announced, and init_ray started none on this machine. Pass an address, set "
        f"RAY_ADDRESS, or start a cluster with `ray start --head`.{theirs}{foreign and f' {foreign}.'}"
    )


def _describe(raylets: list[Raylet]) -> str:
    return ", ".join(f"{one.address} (process {one.starter})" for one in raylets)
