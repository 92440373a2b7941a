# SPDX-License-Identifier: Apache-2.0
"""Which Ray cluster `init_ray` attaches to or starts. No Ray runs here."""

import logging
import os
import socket
import threading
from types import SimpleNamespace

import pytest
import ray

from fairlead_placement import HeadTimeoutError, PlacementError, init_ray
from fairlead_placement._init import find_target, local_tag
from fairlead_placement.extension import attach


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A machine on which nothing is announced and no raylet runs (seam: the processes). Return the list of raylets."""
    raylets = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr("fairlead_placement._init.list_raylets", lambda: list(raylets))
    (tmp_path / "ray").mkdir()
    return raylets


@pytest.fixture
def announce(tmp_path):
    """Return a function that announces an address as `ray start` does, and returns the file."""

    def write(address):
        file = tmp_path / "ray" / "ray_current_cluster"
        file.write_text(f"{address}\n")
        return file

    return write


@pytest.fixture
def listening():
    """Yield the addresses of two servers that accept connections and do not answer."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        yield [f"127.0.0.1:{server.getsockname()[1]}" for server in (one, other)]


def make_raylet(address, *resources, starter=77, started_at=1.0):
    made = {"starter": starter, "started_at": started_at, "user": os.getuid(), "resources": frozenset(resources)}
    return SimpleNamespace(address=address, **made)


@pytest.mark.parametrize("how", ["argument", "RAY_ADDRESS", "file", "process"])
def test_a_head_that_does_not_answer(how, monkeypatch, listening, machine, announce):
    """The error names the address, its origin, and what to do (seam: the head)."""
    answers = threading.Event()
    monkeypatch.setattr("fairlead_placement._init.ATTACH_S", 0.2)
    monkeypatch.setattr("fairlead_placement._init.connect_to_head", lambda address, find_token: answers.wait(60))
    address, file = listening[0], None
    if how == "RAY_ADDRESS":
        monkeypatch.setenv("RAY_ADDRESS", address)
    if how == "file":
        file = announce(address)
    if how == "process":
        machine.append(make_raylet(address, local_tag()))
    with pytest.raises(HeadTimeoutError) as caught:
        init_ray(address=address if how == "argument" else None)
    answers.set()
    reason = {
        "argument": "`address` names",
        "RAY_ADDRESS": "RAY_ADDRESS names",
        "file": f"`ray start` announced in {file}",
        "process": "init_ray started in process 77",
    }[how]
    assert str(caught.value).startswith(
        f"Something listens at {address}, which {reason}, but no Ray head answered there within 0.2 s. Its cluster may "
        "have stopped or hang: stop the rest of it and correct the address (or delete the file), or pass "
        'address="local" to start a cluster of your own.'
    )
    assert not ray.is_initialized()


def test_order(monkeypatch, listening, machine, announce):
    """RAY_ADDRESS comes before the announced cluster, and that before the local one that was started last."""
    older, newer = listening
    machine += [make_raylet(newer, local_tag(), started_at=2.0), make_raylet(older, local_tag())]
    machine.append(make_raylet(newer, "CPU", started_at=3.0))
    assert find_target(None)[0] == newer
    file = announce(older)
    for named in (None, "auto"):
        assert find_target(named)[:2] == (older, f"`ray start` announced in {file}")
    monkeypatch.setenv("RAY_ADDRESS", newer)
    for named in (None, "auto"):
        assert find_target(named)[:2] == (newer, "RAY_ADDRESS names")
    assert find_target(older)[:2] == (older, "`address` names")


def test_another_users_announcement(listening, announce):
    """A file of another user is not followed."""
    if os.getuid() != 0:
        pytest.skip("only root can give a file to another user")
    file = announce(listening[0])
    assert find_target(None)[0] == listening[0]
    os.chown(file, 12345, 12345)
    assert find_target(None) is None
    with pytest.raises(PlacementError, match='"auto" found no Ray cluster that is named'):
        init_ray(address="auto")


@pytest.mark.parametrize("text", ["", "nonsense", "host:", "host:65536", "two\nlines:1", "x" * 400])
def test_an_announcement_that_is_no_address(text, announce):
    announce(text)
    assert find_target(None) is None


def test_auto(monkeypatch, listening, machine, dead_address):
    """ "auto" attaches to the cluster that `init_ray` started here last for these devices, and starts none."""
    one, other = listening
    machine += [make_raylet(one, "CPU"), make_raylet(dead_address, local_tag())]
    message = rf"with the same CUDA_VISIBLE_DEVICES. You run on this machine: {one} \(process 77\)\. Pass the address"
    with pytest.raises(PlacementError, match=message):
        init_ray(address="auto")
    assert find_target("auto", private=True)[:2] == (one, "process 77 started")
    mine = machine.copy()
    machine.clear()
    with pytest.raises(PlacementError, match="Run this on a node of the cluster, or add --address HOST:PORT"):
        find_target("auto", private=True)
    machine += mine
    machine.append(make_raylet(other, "CPU", starter=78))
    monkeypatch.setattr("sys.argv", ["/v/fairlead_inspect/__main__.py", "why", "--after", "1"])
    with pytest.raises(PlacementError) as caught:
        find_target("auto", private=True)
    lines = [f"  python -m fairlead_inspect why --after 1 --address {address}  # process" for address in listening]
    assert str(caught.value).splitlines()[1:] == [f"{lines[0]} 77", f"{lines[1]} 78"]
    machine[-1] = make_raylet(other, local_tag(), starter=78)
    assert find_target("auto")[:2] == (other, "init_ray started in process 78")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert find_target(None) == find_target("auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(PlacementError, match='"auto" found no Ray cluster'):
        find_target("auto")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with pytest.raises(PlacementError, match="RAY_ADDRESS is 'local', which names no running cluster"):
        find_target("auto")


@pytest.mark.parametrize("how", ["argument", "RAY_ADDRESS"])
def test_an_address_of_ray_client(how, monkeypatch):
    """An address of Ray Client is refused by name, with the remedy, before any connection is made."""
    address = "ray://10.0.0.1:10001"
    if how == "RAY_ADDRESS":
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(PlacementError, match=f"{address!r} is an address of Ray Client, .* with `ray job submit`"):
        init_ray(address=address if how == "argument" else None)


@pytest.mark.parametrize(
    ("how", "find_token", "tries"),
    [("argument", True, [True]), ("argument", False, [False]), ("file", False, [True])],
    ids=["a command", "a program", "found"],
)
def test_the_token_of_the_user(monkeypatch, listening, announce, how, find_token, tries):
    """A command takes the user's token for a named cluster too. A program says so by RAY_AUTH_MODE."""
    tried = []

    def connect(address, find_token):
        tried.append(find_token)
        if not find_token:
            raise ray.exceptions.AuthenticationError("no token")

    monkeypatch.setattr(ray, "init", lambda **options: "context")
    monkeypatch.setattr("fairlead_placement._init.connect_to_head", connect)
    if how == "file":
        announce(listening[0])
    named = listening[0] if how == "argument" else "auto"
    if find_token:
        with attach(named):
            pass
    elif tries[-1]:
        assert init_ray(address=named) == "context"
    else:
        with pytest.raises(PlacementError, match="that wants a token"):
            init_ray(address=named)
    assert tried == tries


@pytest.fixture
def dead_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_a_dead_address(dead_address, monkeypatch):
    """An address at which nothing answers is refused before Ray is asked, given or in RAY_ADDRESS."""
    monkeypatch.delattr(ray, "init")  # it tries for minutes
    message = f"No Ray cluster answers at {dead_address}. Start one with `ray start --head`, or correct the address"
    with pytest.raises(PlacementError, match=message):
        init_ray(address=dead_address)
    monkeypatch.setenv("RAY_ADDRESS", dead_address)
    with pytest.raises(PlacementError, match=message):
        init_ray()
    assert not ray.is_initialized()


@pytest.mark.parametrize("address", ["nowhere", "10.0.0.1:", ":6379", "10.0.0.1:port", "10.0.0.1:65536", ""])
def test_a_bad_address(address):
    """An invalid address is refused before any connection is made."""
    with pytest.raises(ValueError, match=f"address must be 'host:port', 'auto' or 'local', got '{address}'"):
        init_ray(address=address)


@pytest.mark.parametrize("found", ["none", "a dead announced one", "a dead local one"])
def test_starting(found, dead_address, monkeypatch, machine, announce):
    """A local Ray is started if none is found, if the one found is dead, or if RAY_ADDRESS says so."""
    started, level = [], logging.getLogger("ray").level
    monkeypatch.setattr(ray, "init", lambda **options: started.append(options) or "context")
    if found == "a dead announced one":
        announce(dead_address)
    if found == "a dead local one":
        machine.append(make_raylet(dead_address, local_tag()))

    assert init_ray(num_cpus=3, num_gpus=1) == "context"
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert init_ray(num_cpus=3, num_gpus=1) == "context"
    for options in started:
        assert (options["address"], options["num_cpus"], options["num_gpus"]) == ("local", 3, 1)
        assert options["resources"] == {local_tag(): 1}
        assert "_temp_dir" not in options
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(PlacementError, match=r'"auto" found no .* You run on this machine: none'):
        init_ray(address="auto")
    assert len(started) == 2
    assert logging.getLogger("ray").level == level
