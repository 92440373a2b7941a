# SPDX-License-Identifier: Apache-2.0
"""Which Ray cluster `init_ray` attaches to or starts. No Ray runs here."""

import logging
import socket
import threading
import time

import pytest
import ray

from fairlead_placement import HeadTimeoutError, PlacementError, init_ray


def test_something_else_answers(monkeypatch):
    """If Ray cannot attach, the error quotes Ray and says that a token may be missing."""

    def refuse(**options):
        raise ConnectionError("no cluster id")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr("fairlead_placement._init.connect_to_head", lambda address: None)
    message = r"but Ray cannot attach to it: no cluster id\. .* RAY_AUTH_MODE=token"
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(PlacementError, match=message):
        init_ray(address=f"127.0.0.1:{other.getsockname()[1]}")


@pytest.mark.parametrize("how", ["argument", "RAY_ADDRESS", "file", "process"])
def test_a_head_that_does_not_answer(how, monkeypatch, tmp_path):
    """The error names the address, its origin, and what to do (seams: the head, Ray's search)."""
    file = tmp_path / "ray_current_cluster"
    answers = threading.Event()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("fairlead_placement._init.ATTACH_S", 0.2)
    monkeypatch.setattr("fairlead_placement._init.connect_to_head", lambda address: answers.wait(60))
    monkeypatch.setattr("fairlead_placement._init.cluster_file", lambda: str(file))
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.setattr("fairlead_placement._init.find_cluster", lambda: address)
        if how == "RAY_ADDRESS":
            monkeypatch.setenv("RAY_ADDRESS", address)
        if how == "file":
            file.write_text(address.replace("127.0.0.1", "10.0.0.1") + "\n")
        with pytest.raises(HeadTimeoutError) as caught:
            init_ray(address=address if how == "argument" else None)
    answers.set()
    origin = {
        "argument": "given as address",
        "RAY_ADDRESS": "from RAY_ADDRESS",
        "file": f"from the file {file}, which Ray writes when it starts; delete it if that cluster has ended",
        "process": "the address of a Ray process that runs on this machine",
    }[how]
    message = str(caught.value)
    assert message.startswith(
        f"Something listens at {address} ({origin}), but no Ray head answered there within 0.2 s."
    )
    assert 'pass address="local" to start a cluster of your own' in message
    assert not ray.is_initialized()


@pytest.fixture
def dead_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_a_dead_address(dead_address, monkeypatch):
    """An address at which nothing answers is refused in seconds, given or in RAY_ADDRESS."""
    message = f"No Ray cluster answers at {dead_address}. Start one with `ray start --head`, or correct the address"
    began = time.monotonic()
    with pytest.raises(PlacementError, match=message):
        init_ray(address=dead_address)
    monkeypatch.setenv("RAY_ADDRESS", dead_address)
    with pytest.raises(PlacementError, match=message):
        init_ray()
    assert time.monotonic() - began < 10
    assert not ray.is_initialized()


@pytest.mark.parametrize("address", ["nowhere", "10.0.0.1:", ":6379", "10.0.0.1:port", "10.0.0.1:65536", ""])
def test_a_bad_address(address, monkeypatch):
    """An invalid address is refused before any connection is made."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ValueError, match=f"address must be 'host:port', 'auto' or 'local', got '{address}'"):
        init_ray(address=address)


@pytest.mark.parametrize("found", [None, "dead"])
def test_starting(found, dead_address, monkeypatch):
    """A local Ray is started if none is found, if the one found is dead, or if RAY_ADDRESS says so."""
    started = []
    monkeypatch.setattr(ray, "init", lambda **options: started.append(options) or "context")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("fairlead_placement._init.find_cluster", lambda: found and dead_address)

    assert init_ray(num_cpus=3, num_gpus=1) == "context"
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert init_ray(num_cpus=3, num_gpus=1) == "context"
    for options in started:
        assert (options["address"], options["num_cpus"], options["num_gpus"]) == ("local", 3, 1)
        assert "_temp_dir" not in options
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(PlacementError, match="No Ray cluster answers at auto"):
        init_ray(address="auto")
    assert len(started) == 2
    assert logging.getLogger("ray").level < logging.ERROR
