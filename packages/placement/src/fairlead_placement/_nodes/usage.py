# SPDX-License-Identifier: Apache-2.0
"""The memory of nodes, which their agents sample while a cluster monitors it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .agent import ANSWER_S, ask_agents, release
from .agent_process import take_sample
from .functions import run_on_nodes
from .head import alive_nodes, head_deadline


@dataclass(frozen=True)
class NodeUsage:
    """Memory of one node, for all its processes together.

    Attributes:
        node_id: Ray's id of the node.
        memory_total_bytes: memory of the machine.
        memory_used_bytes: the memory that is not available.
        memory_available_bytes: the memory that processes can still get.
        memory_peak_bytes: the largest use in any sample.
        samples: how many samples have been taken, including this one.
        sampled_at: when this sample was taken, in seconds since the epoch by the node's clock.
    """

    node_id: str
    memory_total_bytes: int
    memory_used_bytes: int
    memory_available_bytes: int
    memory_peak_bytes: int
    samples: int
    sampled_at: float


def watch(node_ids: Iterable[str], watcher: str) -> None:
    """Have the agents of nodes take a sample for a watcher each second until `unwatch`, without waiting for them."""
    for error in ask_agents("memory", dict.fromkeys(node_ids, (watcher,)), wait=False).values():
        raise error


def read_usage(node_ids: Sequence[str], watcher: str | None) -> tuple[NodeUsage, ...]:
    """Return the memory of each node that is alive, in the order given; raise the error of one that does not answer.

    With a watcher it is from the latest sample of the agents, as for `watch`; without one, this is the only sample.
    """
    with head_deadline():
        alive = alive_nodes()
    asked = [node_id for node_id in node_ids if node_id in alive]
    if watcher is None:
        answers: dict[str, Any] = run_on_nodes(take_sample, dict.fromkeys(asked, ()), timeout_s=ANSWER_S)
    else:
        answers = ask_agents("memory", dict.fromkeys(asked, (watcher,)))
    for answer in answers.values():
        if isinstance(answer, Exception):
            raise answer
    return tuple(NodeUsage(node_id, *answers[node_id]) for node_id in asked)


def unwatch(node_ids: Iterable[str], watcher: str) -> None:
    """Have no more samples taken for a watcher on some nodes. Can be repeated. A silent agent is left alone."""
    release(dict.fromkeys(node_ids, (watcher,)), timeout_s=10.0)
