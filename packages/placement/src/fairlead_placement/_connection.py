# SPDX-License-Identifier: Apache-2.0
"""Which Ray this process is connected to.

Most functions of Ray start one where none runs: whoever asks after what an ended Ray had is to be told so instead.
"""

import ray

__all__ = ["connection"]


def connection() -> str:
    """Which Ray this process is connected to: a text to compare, empty where it is connected to none.

    It is another one once `ray.shutdown()` has been called, also when the same cluster has been joined again: what was
    held before is gone.

    >>> connection()
    ''
    """
    if not ray.is_initialized():
        return ""
    here = ray.get_runtime_context()
    return f"{here.get_session_name()} {here.get_worker_id()}"
