# SPDX-License-Identifier: Apache-2.0
"""Pretend slices are private: drivers of other programs neither find them nor lose the cluster that they use."""

import tempfile


def test_private(run_python):
    """Neither the start nor the end of the slices changes what `ray start` has announced."""
    with tempfile.TemporaryDirectory(prefix="fl-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        out = run_python(
            """
            import os
            from pathlib import Path
            from fairlead_tpu_executor.testing import PretendSlices

            file = Path(os.environ["RAY_TMPDIR"], "ray", "ray_current_cluster")
            for announced in (None, "10.0.0.1:6379"):
                if announced:
                    file.write_text(announced)
                with PretendSlices():
                    print(file.exists() and file.read_text())
                print(file.exists() and file.read_text())
            """,
            RAY_TMPDIR=folder,
        )
    assert out.splitlines() == ["False", "False", "10.0.0.1:6379", "10.0.0.1:6379"]
