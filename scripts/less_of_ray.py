# SPDX-License-Identifier: Apache-2.0
"""Start nodes of Ray without processes that serve no test and no example, in all processes of an environment of nox.

Ray starts the server of its dashboard and an autoscaler that adds no node with each head, and an agent for the
dashboard with each node, although the packages of the dashboard are missing. Each of these processes imports Ray. The
agent then writes three files and waits, which a script does here. Where the dashboard is installed, its agent starts as
Ray starts it.
"""

# Every process of the environment imports this module, so it imports little.
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

AGENT = os.path.join(os.path.dirname(__file__), "dashboard_agent.sh")
OPTION = "--dashboard_agent_command="


def replace_agent(argument: str) -> str:
    """Return an argument of a raylet, with the script in place of the agent."""
    if not argument.startswith(OPTION) or "--minimal" not in argument:
        return argument
    import re
    import shlex

    own = dict(re.findall(r"--(session-dir|node-id)=(\S+)", argument))
    return OPTION + shlex.join(["sh", AGENT, own["session-dir"], own["node-id"]])


def change_services(services: ModuleType) -> None:
    """Let the nodes that this process starts have the script for an agent."""
    start = services.start_ray_process

    def start_with_agent(command: list[str], *args: object, **options: object) -> object:
        return start(list(map(replace_agent, command)), *args, **options)

    services.start_ray_process = start_with_agent


def change_node(node: ModuleType) -> None:
    """Let the nodes that this process starts have none of the processes that are not needed."""
    for name in NEEDLESS:
        setattr(node.Node, name, lambda node, **_: None)


# The methods of Ray's nodes that start such processes. The monitor is an autoscaler that adds no node.
NEEDLESS = ["start_api_server", "start_monitor"]
CHANGES = {"ray._private.services": change_services, "ray._private.node": change_node}


class Finder:
    """Finds the modules of Ray that start processes, and changes them once they have been executed."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the specification of such a module."""
        if name not in CHANGES or (spec := PathFinder.find_spec(name, path)) is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            CHANGES[name](module)

        spec.loader.exec_module = execute_and_change
        return spec


def start_less() -> None:
    """Change the modules of Ray, those that have been imported and those that will be. Repeating it does nothing."""
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)
        for name in CHANGES.keys() & sys.modules.keys():
            CHANGES[name](sys.modules[name])


def start_no_log_monitor() -> None:
    """Start no process that brings what workers print to the drivers."""
    from ray._private import node

    NEEDLESS.append("start_log_monitor")
    change_node(node)
