# SPDX-License-Identifier: Apache-2.0
"""The processes of a stream: what each says of itself, and the place of each."""

import hashlib
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from .._remote.sockets import listen

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Membership:
    """The place of a process in a transfer."""

    number: int  # of this process: the senders first, then the receivers
    senders: int  # the number of processes that send
    nodes: tuple[str, ...]  # of every process: those with the same one can share memory
    addresses: tuple[tuple[str, int], ...]  # where every process listens, if it has to
    secret: bytes = field(repr=False)  # what all processes of the transfer share

    @property
    def receivers(self) -> range:
        """The numbers of the receivers."""
        return range(self.senders, len(self.nodes))

    @property
    def listens(self) -> bool:
        """Whether others connect to this process: to the first sender, and to senders with receivers elsewhere."""
        mine = self.nodes[self.number]
        far = any(self.nodes[number] != mine for number in self.receivers)
        return self.number == 0 or (self.number < self.senders and far)

    def find_readers(self) -> dict[int, list[int]]:
        """Return the receivers that get a bucket from senders, and for each the others that get it from there.

        On a node where a sender's memory is missing, one receiver reads for all, so that every byte enters once.
        """
        by_node: dict[str, list[int]] = {}
        for number in self.receivers:
            by_node.setdefault(self.nodes[number], []).append(number)
        readers: dict[int, list[int]] = {}
        for node, members in by_node.items():
            is_near = set(self.nodes[: self.senders]) == {node}
            readers |= {number: [] for number in members} if is_near else {members[0]: members[1:]}
        return readers


def find_node() -> str:
    """Return what processes share that can share memory and reach each other's loopback: host, user and namespaces."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = [Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("pid", "net")]
    return ":".join(map(str, (socket.gethostname(), os.getuid(), *namespaces, boot)))


def reserve_ports() -> dict[str, socket.socket]:
    """Return sockets that listen, by address: loopback first, and last that of the node; others may be elsewhere."""
    host = ray.util.get_node_ip_address()
    ports = {LOOPBACK: listen(LOOPBACK)}
    try:
        ports[host] = ports.get(host) or listen(host)
    except OSError as error:
        ports[LOOPBACK].close()
        text = f"This process cannot listen on its node's address {host}: {error}."
        raise ValueError(f"{text} Start Ray with --node-ip-address set to an address of this host.") from error
    return ports


def describe(ports: Mapping[str, socket.socket], bucket_bytes: int) -> dict[str, Any]:
    """Return what the other processes have to know of this one. It holds a part of the transfer's secret."""
    addresses = [reserved.getsockname() for reserved in ports.values()]
    return {
        "node": find_node(),
        "token": secrets.token_bytes(16),
        "address": addresses[-1],
        "local_address": addresses[0],
        "bucket_bytes": bucket_bytes,
    }


def make_memberships(metadata: Sequence[Mapping[str, Any]], senders: int) -> list[Membership]:
    """Return the membership of each process from what `describe` has returned in all, the senders first.

    ValueError for no process on one side, or different sizes of buckets.
    """
    if not 0 < senders < len(metadata):
        raise ValueError(f"A transfer needs a sender and a receiver, got {senders} of {len(metadata)} that send.")
    sizes = sorted({member["bucket_bytes"] for member in metadata})
    if len(sizes) > 1:
        raise ValueError(f"The processes have buckets of {sizes} bytes: configure one size.")
    nodes = tuple(member["node"] for member in metadata)
    secret = hashlib.sha256(b"".join(member["token"] for member in metadata)).digest()
    key = "local_address" if len(set(nodes)) == 1 else "address"
    addresses = tuple(tuple(member[key]) for member in metadata)
    return [Membership(number, senders, nodes, addresses, secret) for number in range(len(metadata))]
