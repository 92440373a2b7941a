# SPDX-License-Identifier: Apache-2.0
"""Tests of the hosts, networks and drivers that the other tests in this folder use."""

import contextlib
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
import ray

from .driver import DriverError
from .network import Network

pytestmark = pytest.mark.nightly


def test_hosts_are_separate(make_hosts, tmp_path):
    """A host has its own address, variables and folders, and drivers on other hosts do not see them."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    (tmp_path / "seen").mkdir()

    def look():
        return os.environ.get("MARK"), os.listdir(tmp_path / "seen"), ray.util.get_node_ip_address()

    def driver():
        return look(), ray.get(ray.remote(look).remote(), timeout=40)

    hosts = make_hosts()
    hosts.start_host(num_cpus=0)
    host = hosts.start_host(env={"MARK": "here"}, binds={str(tmp_path / "seen"): str(tmp_path / "mine")})
    assert hosts.drive(driver) == ((None, [], hosts.head.address), ("here", ["file"], host.address))
    assert os.listdir(tmp_path / "seen") == []


def test_failing_drivers(hosts, tmp_path, eventually):
    """An exception of a driver is raised in the test. The error about a driver that hangs or dies has its output."""

    hanging = tmp_path / "hanging"

    def raises():
        raise LookupError("lost")

    def hangs():
        yield
        sys.stderr.write("about to hang\n")
        hanging.touch()
        time.sleep(600)

    def dies():
        sys.stderr.write("about to die\n")
        os._exit(3)

    with pytest.raises(LookupError, match="lost"):
        hosts.drive(raises)
    with contextlib.closing(hosts.driver(hangs, attach=False)) as driving:
        driving.step()
        driving.resume()
        assert eventually(hanging.exists)
        with pytest.raises(DriverError, match=r"within 2 s\n(.*\n)*about to hang\n(.*\n)*.* in hangs\n"):
            driving.receive(timeout_s=2)
    with pytest.raises(DriverError, match=r"died: 3\n(.*\n)*about to die"):
        hosts.drive(dies, attach=False)


def test_crashed_run(namespaces):
    """A run removes the namespaces, processes and folder of an earlier run that was killed."""
    source = """
        import os, subprocess
        from network import Network
        network = Network()
        space, _ = network.add()
        sleeper = subprocess.Popen(["ip", "netns", "exec", space, "sleep", "600"], stdout=subprocess.DEVNULL)
        print(network.name, sleeper.pid, flush=True)
        input()
    """
    crashed = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source)],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    name, pid = crashed.stdout.readline().split()
    with Network():
        assert name in list_leftovers(name)  # The other run has not ended yet.
        crashed.kill()
        crashed.wait()
    with Network():
        assert list_leftovers(name) == ""
        assert not is_running(int(pid))


def list_leftovers(name):
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return " ".join(
        [line for line in listed.splitlines() if name in line] + [*map(str, Path(tempfile.gettempdir()).glob(name))]
    )


def is_running(pid):
    try:
        return ") Z " not in Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return False
