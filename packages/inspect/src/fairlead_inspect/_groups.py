# SPDX-License-Identifier: Apache-2.0
"""Fairlead's groups: the rank of each member, and what its worker has recorded, as plain dictionaries."""

import importlib
import importlib.util
import math
from collections import Counter
from collections.abc import Collection
from typing import Any

from fairlead_placement.extension import ask_head, find_boards, group_pairs, read_boards, run_on_nodes

_LIBRARY = "fairlead_workergroup"
# Of the time for everything, the part that each of the two requests may take.
_PART = 0.4


def read_labels(job_ids: Collection[str], timeout_s: float) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the labels of a `Snapshot` and further notes for it. Workers receive no signal and run nothing."""
    if importlib.util.find_spec(_LIBRARY) is None:
        return {}, []
    boards = [
        board for board in ask_head("list the boards", find_boards, timeout_s=timeout_s) if board.job_id in job_ids
    ]
    if not boards:  # a job without boards has no groups, and the library need not be loaded
        return {}, []
    # By name, so that nothing here depends on the library.
    library = importlib.import_module(f"{_LIBRARY}.extension")
    published, notes = [], []
    for board, values in read_boards(boards, "", timeout_s=timeout_s * _PART).items():
        if isinstance(values, Exception):
            notes.append(f"Fairlead's groups of process {board.owner[:8]} are not known: {_reason(values)}")
        else:
            published += [(board, value) for value in values.values()]
    groups = library.read_groups(published)
    members = group_pairs((member.node_id, member) for group in groups for member in group.state.members)
    # No stacks, for which workers would be interrupted.
    arguments = {
        node_id: ([(member.pid, member.started, member.mark) for member in its], math.inf, False)
        for node_id, its in members.items()
    }
    records: dict[str, dict[str, Any]] = {}
    answers = run_on_nodes(library.look_from_outside, arguments, timeout_s=timeout_s * _PART)
    for node_id, answer in answers.items():
        if isinstance(answer, Exception):
            notes.append(f"Fairlead's groups on node {node_id[:8]} are not known: {_reason(answer)}")
        else:
            records |= {member.actor_id: row for member, row in zip(members[node_id], answer, strict=True)}
    alike = Counter((group.board.job_id, group.name) for group in groups)
    labels = {}
    for group in groups:
        name = group.name if alike[group.board.job_id, group.name] == 1 else group.label
        of_group = {"group": name, "world_size": len(group.state.members)}
        for member in group.state.members:
            record = records.get(member.actor_id, {})
            of_record = {"waiting": bool(record.get("waiting")), "step": record.get("step")}
            labels[member.actor_id] = {"rank": member.rank, "coords": dict(member.coords), **of_group, **of_record}
    labels.pop("", None)  # a member whose actor has not been created
    return labels, notes


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
