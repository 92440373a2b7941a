# SPDX-License-Identifier: Apache-2.0
"""In the environments of nox, nodes of Ray start without processes that serve no test: see scripts/less_of_ray.py."""

import json
import runpy
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
LESS = runpy.run_path(str(SCRIPTS / "less_of_ray.py"))
# Prints the names of the programs of a Ray, and whether the agent of environments has imported Ray before and after a
# task with an environment, which prints its variable.
START = """
import contextlib
import json
import os
import less_of_ray
{first}
less_of_ray.start_less()
less_of_ray.start_less()
import ray
from pathlib import Path

ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="error", log_to_driver=False)
session, programs = ray._private.worker._global_node.get_session_dir_path(), {{}}
for path in Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError):  # it has ended
        if session in (command := (path / "cmdline").read_text()):
            programs |= {{Path(word).name: path for word in command.split("\\0")[:3]}}
read = ray.remote(lambda: os.environ.get("MINE"))
agent = programs["lazy_environments.py"] / "maps"
answers = [ray.get(read.remote()), "_raylet" in agent.read_text()]
mine = read.options(runtime_env={{"env_vars": {{"MINE": "yes"}}}})
answers += [ray.get(mine.remote()), "_raylet" in agent.read_text()]
print(json.dumps([sorted(programs), answers]))
"""


@pytest.mark.parametrize("first", ["", "import ray"])
def test_processes(run_python, first):
    """A head has its own programs, and agents that import nothing, of which the one of environments works when used."""
    names, answers = json.loads(run_python(START.format(first=first), PYTHONPATH=str(SCRIPTS)).splitlines()[-1])
    assert answers == [None, False, "yes", True]
    assert {"gcs_server", "raylet", "dashboard_agent.sh"} <= set(names)
    assert not {"dashboard.py", "agent.py", "monitor.py"} & set(names)


IDLE = """
import subprocess, sys, tempfile, time
from pathlib import Path

folder = Path(tempfile.mkdtemp())
options = {{"node-id": "a", "node-ip-address": "127.0.0.1", "runtime-env-agent-port": "0", "session-dir": folder}}
command = [sys.executable, {program!r}, "main.py", *(f"--{{name}}={{value}}" for name, value in options.items())]
agent = subprocess.Popen(command)
while not (folder / "runtime_env_agent_port_a").exists():
    time.sleep(0.01)
print(agent.pid)
"""


def test_an_agent_that_is_not_used(run_python, eventually):
    """The agent of environments ends with its raylet, also if nobody has ever used it."""
    stat = Path("/proc", run_python(IDLE.format(program=str(SCRIPTS / "lazy_environments.py"))).strip(), "stat")

    def has_ended():
        try:
            return stat.read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    assert eventually(has_ended)


def test_other_agents():
    """The agent of a dashboard that is installed starts as Ray starts it, and so does one with other arguments."""
    environments = "--runtime_env_agent_command=python -u /ray/_private/runtime_env/agent/main.py --node-id=b"
    for argument in ("--dashboard_agent_command=python agent.py --session-dir=a --node-id=b", environments, "--head"):
        assert LESS["replace_agent"](argument) == argument
    replaced = LESS["replace_agent"]("--dashboard_agent_command=python agent.py --session-dir=a --node-id=b --minimal")
    assert replaced == f"--dashboard_agent_command=sh {SCRIPTS / 'dashboard_agent.sh'} a b"
    options = " --node-ip-address=c --runtime-env-agent-port=0 --session-dir=a --log-dir=d"
    before, program = environments.split("/ray", 1)
    lazy = f"{before}{SCRIPTS / 'lazy_environments.py'} /ray{program}{options}"
    assert LESS["replace_agent"](environments + options) == lazy
