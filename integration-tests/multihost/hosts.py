# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of several hosts on one machine, each with its own address and raylet, and with injected faults."""

import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .driver import PATIENCE_S, Driver
from .network import Network, processes

__all__ = ["Host", "Hosts"]

_PORT = 6379
# Ray declares a killed raylet dead after about 2 s, because it refuses connections. A raylet that does not respond is
# declared dead after about 16 s, which tolerates a link that is cut for 5 s, and a busy machine.
_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}


@dataclass(frozen=True)
class Host:
    """One host, with its address and the prefix of a command line that runs a program on it."""

    space: str
    address: str
    prefix: tuple[str, ...]


class Hosts:
    """A cluster of hosts. The first one started is the head, on which drivers run.

    The hosts have networks of their own, but share the machine's files, shared memory and table of processes.

    Args:
        auth: whether the cluster requires a token (`RAY_AUTH_MODE`). The file `token_path` contains the token.

        with Hosts() as hosts:
            hosts.start_host(num_cpus=0)
            other = hosts.start_host(num_cpus=2, resources={"spare": 1}, labels={"ray.io/gpu-domain": "a"})
            assert hosts.drive(function, "argument") == "answer"
            hosts.kill(other)
    """

    def __init__(self, *, auth: bool = True) -> None:
        self._hosts: list[Host] = []
        self._drivers = 0
        self._network = Network()
        self._folder = self._network.folder
        self.token_path = self._folder / "token"
        self.token_path.write_text(secrets.token_hex(32))
        self.env = {
            # Ignore settings that the machine's user has made for another cluster.
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "RAY_TMPDIR": str(self._folder),
            "RAY_AUTH_MODE": "token" if auth else "disabled",
            "RAY_AUTH_TOKEN_PATH": str(self.token_path),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_memory_monitor_refresh_ms": "0",
        }

    @property
    def head(self) -> Host:
        return self._hosts[0]

    @property
    def addresses(self) -> list[str]:
        """Return the addresses of all hosts in the order in which they were started."""
        return [host.address for host in self._hosts]

    @property
    def address(self) -> str:
        """Return the address of the cluster for `ray.init`."""
        return f"{self.head.address}:{_PORT}"

    def start_host(
        self,
        *,
        num_cpus: float = 2,
        resources: Mapping[str, float] | None = None,
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        binds: Mapping[str, str] | None = None,
    ) -> Host:
        """Start a host, and return it when it has joined.

        Hosts start one at a time, because several raylets that start at once time out on a small machine.

        Args:
            num_cpus: logical CPUs.
            resources: custom resources.
            labels: node labels.
            env: environment variables of the raylet and its workers, but not of drivers on the head.
            binds: folders to mount on this host over others, such as `{"/opt/env": "/tmp/env-of-host-2"}`.
        """
        space, address = self._network.add()
        host = Host(space, address, _prefix(space, binds or {}))
        first = not self._hosts
        joining = (
            ["--head", f"--port={_PORT}", "--include-dashboard=false", f"--system-config={json.dumps(_HEALTH_CHECKS)}"]
            if first
            else [f"--address={self.address}"]
        )
        command = [
            *host.prefix,
            *(sys.executable, "-m", "ray.scripts.scripts", "start"),
            *joining,
            f"--node-ip-address={address}",
            f"--num-cpus={num_cpus:g}",
            f"--resources={json.dumps(dict(resources or {}))}",
            f"--labels={','.join(f'{name}={value}' for name, value in (labels or {}).items())}",
            "--object-store-memory=100000000",
            # It would outlive the raylet of a host that a test kills, and use 3 % of a core.
            "--include-log-monitor=false",
            "--disable-usage-stats",
        ]
        # The output goes to a file, because Ray's daemons would keep a pipe open.
        log = self._folder / f"start-{address}.log"
        with log.open("wb") as output:
            done = subprocess.run(
                command,
                env={**self.env, **(env or {})},
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=PATIENCE_S,
            )
        if done.returncode:
            raise RuntimeError(f"ray start on {address} failed:\n{log.read_text(errors='replace')[-4000:]}")
        self._hosts.append(host)
        return host

    def host_at(self, address: str) -> Host:
        """Return the host with an address, such as a slot's `node_ip`."""
        return next(host for host in self._hosts if host.address == address)

    def kill(self, host: Host) -> bool:
        """Kill the raylet, which also ends its workers. Return False if there was no raylet."""
        raylets = [pid for pid in processes(host.space) if _program(pid) == "raylet"]
        for pid in raylets:
            os.kill(pid, signal.SIGKILL)
        return bool(raylets)

    def cut(self, host: Host) -> None:
        """Take the host's link down. Packets in both directions are dropped without an error."""
        self._network.link(host.space, "down")

    def restore_link(self, host: Host) -> None:
        """Bring the link up again."""
        self._network.link(host.space, "up")

    def driver(
        self,
        function: Callable[..., Any],
        *args: Any,
        attach: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> Driver:
        """Start a driver on the head that the test runs step by step.

        Args:
            function: the function to run. It is pickled by value, with the functions and classes of its module.
            args: arguments of the function.
            attach: whether to attach to the cluster first, and to check at the end for lost or leaked resources.
            env: environment variables of the driver.
        """
        self._drivers += 1
        return Driver(
            self.head.prefix,
            function,
            *args,
            address=self.address if attach else None,
            env={**self.env, **(env or {})},
            log=self._folder / f"driver-{self._drivers}.log",
        )

    def drive(
        self,
        function: Callable[..., Any],
        *args: Any,
        attach: bool = True,
        env: Mapping[str, str] | None = None,
        timeout_s: float = PATIENCE_S,
    ) -> Any:
        """Run a function as a driver on the head, and return its result or raise its exception."""
        with self.driver(function, *args, attach=attach, env=env) as driver:
            return driver.step(timeout_s=timeout_s)

    def run(self, *arguments: str, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
        """Run `python -m` with these arguments on the head, from outside of any job."""
        return subprocess.run(
            [*self.head.prefix, sys.executable, "-m", *arguments],
            env={**self.env, "RAY_ADDRESS": self.address},
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def close(self) -> None:
        """End all processes and remove everything."""
        self._network.close()

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _program(pid: int) -> str:
    try:
        return Path("/proc", str(pid), "comm").read_text().strip()
    except OSError:  # The process has ended in the meantime.
        return ""


def _prefix(space: str, binds: Mapping[str, str]) -> tuple[str, ...]:
    inside = ("ip", "netns", "exec", space)
    if not binds:
        return inside
    # `ip netns exec` runs each command in its own mount namespace.
    mounts = [f"mount --bind {shlex.quote(source)} {shlex.quote(target)}" for target, source in binds.items()]
    return (*inside, "sh", "-c", " && ".join([*mounts, 'exec "$@"']), "sh")
