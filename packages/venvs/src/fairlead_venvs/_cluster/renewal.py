# SPDX-License-Identifier: Apache-2.0
"""Marks of use on shared folders, renewed while processes run: another host sees nothing else of them."""

import logging
import threading
from collections.abc import Iterable

from .._build import node_task
from .._build.uv import Deadline
from .rpc import alive_nodes, on_nodes

__all__ = ["HERE", "keep_marked"]

logger = logging.getLogger(__name__)

# How often a mark is renewed, in seconds. `prune` spares what another host has marked three times as long ago.
RENEW_S = 600.0
# How long a node may take to answer, in seconds.
ANSWER_S = 60.0
# An environment without a process is looked at this often, as its workers may start again. Then it is forgotten until
# it is asked for again.
LOOKS = 6
# In the place of a node, for this machine.
HERE = ""

_lock = threading.Lock()
# How often nobody was found in an environment, by its folder and node.
_looks: dict[tuple[str, str], int] = {}
_thread: threading.Thread | None = None


def keep_marked(used: Iterable[tuple[str, str]]) -> None:
    """Renew the marks of environments on shared folders as long as this process and those that run from them live.

    Args:
        used: the folder of each, and the node, or HERE.
    """
    global _thread
    new = dict.fromkeys(used, 0)
    if not new:
        return
    with _lock:
        _looks.update(new)
        if _thread is None or not _thread.is_alive():  # a forked process has none
            _thread = threading.Thread(target=_renew, args=(threading.Event(),), name="fairlead-venvs", daemon=True)
            _thread.start()


def _renew(never: threading.Event) -> None:
    global _thread
    while True:
        never.wait(RENEW_S)
        with _lock:
            known = list(_looks)
        seen = _marked(known)
        with _lock:
            for one in known:
                _looks[one] = 0 if one in seen else _looks[one] + 1
                if _looks[one] >= LOOKS:
                    del _looks[one]
            if not _looks:
                _thread = None
                return


def _marked(known: list[tuple[str, str]]) -> set[tuple[str, str]]:
    """Mark what is in use, and return it."""
    seen = {(folder, node) for folder, node in known if node == HERE and node_task.renew_here(folder)[0] == "ready"}
    elsewhere = [(folder, node) for folder, node in known if node != HERE]
    try:
        there = alive_nodes() if elsewhere else {}
        asked = [one for one in elsewhere if one[1] in there]
        calls = [(node, node_task.renew_here, (folder,)) for folder, node in asked]
        deadline = Deadline(ANSWER_S)
        answers = on_nodes(calls, there, doing="renewing a mark of use", deadline=deadline) if calls else []
    except Exception as error:  # noqa: BLE001 - Ray may be shut down meanwhile; the next look is the retry
        logger.debug("Marks of use were not renewed: %s", error)
        return seen
    return seen | {one for one, answer in zip(asked, answers, strict=True) if not isinstance(answer, Exception | None)}
