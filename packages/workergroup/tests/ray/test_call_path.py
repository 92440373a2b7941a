# SPDX-License-Identifier: Apache-2.0
"""How many functions of the package a call enters, on all threads of the driver."""

import sys
import threading
from pathlib import Path

import fairlead_workergroup

MOST_FUNCTIONS = 35
# View, plan, arguments, class, core, replies, call, results, and the seam to the clock and the connection.
MOST_FILES = 9
SOURCE = str(Path(fairlead_workergroup.__file__).parent)


def test_few_functions_in_few_files(group):
    """A call of eight workers enters few functions in few files."""
    entered = set()

    def note(frame, event, _):
        code = frame.f_code
        # Comprehensions and generator expressions are parts of a function.
        if event == "call" and code.co_filename.startswith(SOURCE) and code.co_name[-5:] not in ("comp>", "expr>"):
            entered.add(code)

    group.call("rank").result()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        assert group.call("rank").result() == list(range(8))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert len(entered) <= MOST_FUNCTIONS, sorted(code.co_qualname for code in entered)
    files = {code.co_filename for code in entered}
    assert len(files) <= MOST_FILES, sorted(files)
