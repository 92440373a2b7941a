# SPDX-License-Identifier: Apache-2.0
"""Renews marks of use on shared folders while processes run, as other hosts cannot see those processes."""

import logging
import threading
from collections.abc import Iterable

from .._build import node_task
from .._build.recipe import Outcome
from .._build.uv import Deadline
from .rpc import Call, alive_nodes, run_on_nodes

logger = logging.getLogger(__name__)

# Seconds between two renewals. `prune` spares an environment that another host has marked three times as long ago.
RENEW_S = 600.0
# Seconds that a node has to answer.
ANSWER_S = 60.0
# Looks at an environment without a process before it is dropped, as its workers may start again. The next request for
# it adds it again.
LOOKS = 6
# In the place of a node, for this machine.
HERE = ""

_lock = threading.Lock()
# The number of looks that found no process in an environment, by its folder and node.
_looks: dict[tuple[str, str], int] = {}
_thread: threading.Thread | None = None


def keep_marked(used: Iterable[tuple[str, str]]) -> None:
    """Renew the marks of these folders and nodes as long as this process and those that run from them live."""
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
        seen = _mark(known)
        with _lock:
            for one in known:
                _looks[one] = 0 if one in seen else _looks[one] + 1
                if _looks[one] >= LOOKS:
                    del _looks[one]
            if not _looks:
                _thread = None
                return


def _mark(known: list[tuple[str, str]]) -> set[tuple[str, str]]:
    """Mark the environments that are in use, and return them."""
    seen = {(folder, node) for folder, node in known if node == HERE and node_task.renew_here(folder)[0] == "ready"}
    elsewhere = [(folder, node) for folder, node in known if node != HERE]
    try:
        if not elsewhere:
            return seen
        nodes = alive_nodes()
        calls: dict[tuple[str, str], Call] = {
            (folder, node): (node, node_task.renew_here, (folder,))
            for folder, node in elsewhere
            if node in nodes.labels
        }
        answers = run_on_nodes(calls, nodes, doing="renewing a mark of use", deadline=Deadline(ANSWER_S))
    except Exception as error:  # noqa: BLE001 - Ray may be shut down meanwhile; the next look is the retry
        logger.debug("Marks of use were not renewed: %s", error)
        return seen
    return seen | {key for key, answer in answers.items() if isinstance(answer, Outcome)}
