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
from fairlead_placement._init import find_target
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


def make_raylet(address, starter="process 77 `train.py`"):
    return SimpleNamespace(address=address, starter=starter, user=os.getuid())


@pytest.mark.parametrize("how", ["argument", "RAY_ADDRESS", "file", "auto"])
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
    if how == "auto":
        machine.append(make_raylet(address))
    with pytest.raises(HeadTimeoutError) as caught:
        init_ray(address={"argument": address, "auto": "auto"}.get(how))
    answers.set()
    reason = {
        "argument": "`address` names",
        "RAY_ADDRESS": "RAY_ADDRESS names",
        "file": f"`ray start` announced in {file}",
        "auto": "process 77 `train.py` started",
    }[how]
    assert str(caught.value).startswith(
        f"Something listens at {address}, which {reason}, but no Ray head answered there within 0.2 s. Its cluster may "
        "have stopped or hang: stop the rest of it and correct the address (or delete the file), or pass "
        'address="local" to start a cluster of your own.'
    )
    assert not ray.is_initialized()


def test_order(monkeypatch, listening, machine, announce):
    """RAY_ADDRESS comes before the announced cluster, and that before the Ray of another program, only for "auto"."""
    one, other = listening
    machine.append(make_raylet(other))
    assert find_target(None) is None
    assert find_target("auto")[:2] == (other, "process 77 `train.py` started")
    file = announce(one)
    for named in (None, "auto"):
        assert find_target(named)[:2] == (one, f"`ray start` announced in {file}")
    monkeypatch.setenv("RAY_ADDRESS", other)
    for named in (None, "auto"):
        assert find_target(named)[:2] == (other, "RAY_ADDRESS names")
    assert find_target(one)[:2] == (one, "`address` names")


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
    """ "auto" takes the only Ray of this user that answers, and starts none; it lists several."""
    machine += [make_raylet(listening[0]), make_raylet(dead_address)]
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert find_target(None) == find_target("auto") == (listening[0], "process 77 `train.py` started", False)
    machine.append(make_raylet(listening[1], starter="process 78 `a.py`"))
    first, second = rf"{listening[0]} \(process 77 `train\.py`\)", rf"{listening[1]} \(process 78 `a\.py`\)"
    with pytest.raises(PlacementError, match=rf"on this machine: {first}, {second}\. Name the cluster"):
        init_ray(address="auto")
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


@pytest.mark.parametrize("found", ["none", "a dead announced one", "of another program"])
def test_starting(found, dead_address, monkeypatch, machine, announce, listening):
    """A local Ray is started if none is announced, if the announced one is dead, or if RAY_ADDRESS says so."""
    started, level = [], logging.getLogger("ray").level
    monkeypatch.setattr(ray, "init", lambda **options: started.append(options) or "context")
    if found == "a dead announced one":
        announce(dead_address)
    if found == "of another program":
        machine.append(make_raylet(listening[0]))

    assert init_ray(num_cpus=3, num_gpus=1) == "context"
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert init_ray(num_cpus=3, num_gpus=1) == "context"
    for options in started:
        assert (options["address"], options["num_cpus"], options["num_gpus"]) == ("local", 3, 1)
        assert "_temp_dir" not in options
    monkeypatch.delenv("RAY_ADDRESS")
    machine.clear()
    with pytest.raises(PlacementError, match=r'"auto" found no .* You run on this machine: none'):
        init_ray(address="auto")
    assert len(started) == 2
    assert logging.getLogger("ray").level == level
