# SPDX-License-Identifier: Apache-2.0
"""In the environments of nox, nodes of Ray start without processes that serve no test: see scripts/less_of_ray.py."""

import json
import runpy
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
LESS = runpy.run_path(str(SCRIPTS / "less_of_ray.py"))
# Prints the names of the programs of a Ray, and the answer of a task.
START = """
import contextlib
import json
import less_of_ray
{first}
less_of_ray.start_less()
less_of_ray.start_less()
import ray
from pathlib import Path

ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="error", log_to_driver=False)
session, names = ray._private.worker._global_node.get_session_dir_path(), set()
for path in Path("/proc").glob("[0-9]*/cmdline"):
    with contextlib.suppress(OSError):  # it has ended
        if session in (command := path.read_text()):
            names |= {{Path(word).name for word in command.split("\\0")[:3]}}
print(json.dumps([sorted(names), ray.get(ray.remote(lambda: 1).remote())]))
"""


@pytest.mark.parametrize("first", ["", "import ray"])
def test_processes(run_python, first):
    """A head has its own programs, the agent of environments, and the script in place of the dashboard's agent."""
    names, answer = json.loads(run_python(START.format(first=first), PYTHONPATH=str(SCRIPTS)).splitlines()[-1])
    assert answer == 1
    assert {"gcs_server", "raylet", "dashboard_agent.sh"} <= set(names)
    assert not {"dashboard.py", "agent.py", "monitor.py"} & set(names)


def test_an_agent_that_is_installed():
    """The agent of a dashboard that is installed starts as Ray starts it, and so does everything else."""
    for argument in ("--dashboard_agent_command=python agent.py --session-dir=a --node-id=b", "--minimal", "--head"):
        assert LESS["replace_agent"](argument) == argument
    replaced = LESS["replace_agent"]("--dashboard_agent_command=python agent.py --session-dir=a --node-id=b --minimal")
    assert replaced == f"--dashboard_agent_command=sh {SCRIPTS / 'dashboard_agent.sh'} a b"
