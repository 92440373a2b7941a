# SPDX-License-Identifier: Apache-2.0
"""Use fairlead-inspect as type checkers see it. `nox -s typecheck` checks these types; nothing runs them.

A comment that ignores an error marks a use that type checkers must reject: an ignore without an error is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from pathlib import Path
from typing import Literal, assert_type

import fairlead_inspect as fi


def look_at_any_job(path: Path) -> None:
    snapshot = fi.look("auto", job="01000000", window_s=0.5, timeout_s=10)
    assert_type(snapshot, fi.Snapshot)
    findings = fi.diagnose(snapshot, after_s=60)
    assert_type(findings, tuple[fi.Finding, ...])
    assert_type(fi.write_report(snapshot, findings, path), None)
    for found in findings:
        assert_type((found.text, found.remedy, found.ranks), tuple[str, str, tuple[int, ...]])
        assert_type(found.confidence, Literal["certain", "likely", "guess"])
        assert_type((found.actors, found.where), tuple[tuple[fi.Named, ...], tuple[fi.Frame, ...]])
        assert_type((found.waiting, found.evidence), tuple[fi.Waiting, tuple[fi.Evidence, ...]])
    assert_type([alike.where for alike in fi.fold_stacks(snapshot)], list[tuple[fi.Frame, ...]])
    assert_type(next(iter(fi.fold_stacks(snapshot))), fi.StackClass)
    assert_type(fi.label(rank=3, group="policy", world_size=8, coords={"dp": 1}), dict[str, str])
    fi.look(None)  # type: ignore[arg-type]
    fi.label(3, "policy")  # type: ignore[call-arg]
