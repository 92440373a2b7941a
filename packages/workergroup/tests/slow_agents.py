# SPDX-License-Identifier: Apache-2.0
"""Functions that run in a node agent, and let it publish or answer late."""

import gc
import time


def find_agent():
    """Return the object of the node agent whose process this is."""
    return next(one for one in gc.get_objects() if type(one).__name__ == "AgentProcess")


def slow_down():
    """Let the agent of this process publish only after a second."""
    agent = find_agent()
    publish = agent.publish
    agent.publish = lambda *args: (time.sleep(1.0), publish(*args))


def delay_looks():
    """Let the agent of this process run functions only after two seconds, as on a very busy node."""
    agent = find_agent()
    run = agent.run
    agent.run = lambda *args: (time.sleep(2.0), run(*args))[1]


def stop_delays():
    """Let the agent of this process run functions as before."""
    del find_agent().run


def speed_up():
    """Let the agent of this process publish as before."""
    del find_agent().publish
