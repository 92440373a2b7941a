# SPDX-License-Identifier: Apache-2.0
"""The environments of nox import some modules at their first use: see scripts/defer_imports.py."""

from pathlib import Path

SCRIPTS = Path(__file__).parent.parent / "scripts"


def test_first_use(run_python):
    """Ray imports all of these modules and uses none; each is complete when it is used, and fails as it would."""
    printed = run_python(
        """
        import sys
        import defer_imports
        import ray

        def find_deferred():
            return {name for name in defer_imports.DEFERRED if type(sys.modules[name]) is defer_imports.Deferred}

        assert find_deferred() == defer_imports.DEFERRED
        import requests.adapters
        assert find_deferred() == defer_imports.DEFERRED - {"requests"}
        from jsonschema import ValidationError, validate
        try:
            validate(1, {"type": "string"})
        except ValidationError as error:
            print(error.message)
        print(requests.adapters.HTTPAdapter is requests.sessions.HTTPAdapter, find_deferred())
        import yaml
        print(hasattr(yaml, "no_such_name"), yaml.safe_load("a: 1"), find_deferred())
        """,
        PYTHONPATH=str(SCRIPTS),
    )
    assert printed.splitlines() == ["1 is not of type 'string'", "True {'yaml'}", "False {'a': 1} set()"]


def test_failure_and_threads(run_python, tmp_path):
    """A module that fails is executed again at the next access, once, and other threads wait until it is complete."""
    (tmp_path / "slow.py").write_text(
        "import os, time\nprint('executed')\ntime.sleep(0.2)\n"
        "if os.path.exists('broken'):\n    raise OSError('broken')\nlast = 1\n"
    )
    (tmp_path / "broken").touch()
    printed = run_python(
        """
        import os
        import threading
        import defer_imports

        defer_imports.DEFERRED.add("slow")
        import slow
        try:
            slow.last
        except OSError as error:
            print(error)
        os.unlink("broken")
        seen = []
        threads = [threading.Thread(target=lambda: seen.append(slow.last)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(seen)
        """,
        PYTHONPATH=str(SCRIPTS),
    )
    assert printed.splitlines() == ["executed", "broken", "executed", str([1] * 8)]
