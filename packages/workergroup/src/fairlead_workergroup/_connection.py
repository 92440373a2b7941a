# SPDX-License-Identifier: Apache-2.0
"""Which Ray this process is connected to.

Most functions of Ray start one where none runs: whoever asks after what an ended Ray had is to be told so instead.
"""

import ray

__all__ = ["connection"]


def connection() -> str:
    """Another one once Ray has been shut down here, also if it was started or joined again; empty where none runs."""
    if not ray.is_initialized():
        return ""
    here = ray.get_runtime_context()
    return f"{here.get_session_name()} {here.get_worker_id()}"
