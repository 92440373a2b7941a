# SPDX-License-Identifier: Apache-2.0
"""Ray's agent of runtime environments, which imports nothing until a node asks it for an environment.

A node of Ray waits at its start until this agent listens, and the agent imports Ray before, although most nodes of
tests never ask it. This program listens at once. When somebody connects, it becomes the agent. Its arguments are the
path of the agent's program and the arguments of that.
"""

import os
import select
import socket
import sys

# How often it looks whether its raylet has ended.
LOOK_S = 1.0


def listen(options: dict[str, str]) -> socket.socket:
    """Return a socket that listens, after its port has been written where the raylet looks for it."""
    port = int(options["--runtime-env-agent-port"])
    ((family, kind, protocol, _, address), *_) = socket.getaddrinfo(
        options["--node-ip-address"], port, type=socket.SOCK_STREAM
    )
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    listener.listen(128)
    path = os.path.join(options["--session-dir"], f"runtime_env_agent_port_{options['--node-id']}")
    with open(f"{path}.new", "w") as file:
        file.write(str(listener.getsockname()[1]))
    os.rename(f"{path}.new", path)
    return listener


def wait_for_request(listener: socket.socket, raylet: int) -> None:
    """Return when somebody connects. The process ends if its raylet has ended."""
    while not select.select([listener], [], [], LOOK_S)[0]:
        if os.getppid() != raylet:
            sys.exit()


def become_agent(listener: socket.socket, arguments: list[str]) -> None:
    """Run the agent's program, which gets this socket when it binds one to the port."""
    import runpy  # it is needed only now

    port, bind = listener.getsockname()[1], socket.socket.bind

    def take_listener(own: socket.socket, address: tuple[str, int]) -> None:
        if address[1] == port:
            os.dup2(listener.fileno(), own.fileno())
        else:
            bind(own, address)

    socket.socket.bind = take_listener
    sys.argv = [f"--runtime-env-agent-port={port}" if "-agent-port=" in one else one for one in arguments]
    runpy.run_path(arguments[0], run_name="__main__")


def main() -> None:
    raylet, options = os.getppid(), dict(one.split("=", 1) for one in sys.argv[2:] if "=" in one)
    listener = listen(options)
    wait_for_request(listener, raylet)
    become_agent(listener, sys.argv[1:])


if __name__ == "__main__":
    main()
