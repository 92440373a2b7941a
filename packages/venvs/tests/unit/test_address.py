# SPDX-License-Identifier: Apache-2.0
"""Which cluster `--address` of the command line is. No Ray runs here: `ray.init` is replaced."""

import os
import sys

import pytest
import ray

from fairlead_venvs import __main__ as command
from fairlead_venvs import _ray_private as private
from fairlead_venvs._cluster import rpc


@pytest.fixture(autouse=True)
def joined(monkeypatch, tmp_path):
    """Return the list of the addresses that are passed to `ray.init`. Nothing is announced."""
    joined = []
    monkeypatch.setattr(ray, "init", lambda address, **options: joined.append(address))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    return joined


def attach(capsys, address):
    """Run a command with an address, up to the attaching, and return its exit status and its errors."""
    status = command.main(["build", "-r", "idna", "--address", address])
    return status, capsys.readouterr().err


def test_auto(joined, capsys, monkeypatch, tmp_path):
    """ "auto" is the cluster in RAY_ADDRESS, or the one that `ray start` of this user announced; no other one."""
    monkeypatch.setattr(command, "create_local_venv_on_each_node", lambda *_, **__: "python")
    status, errors = attach(capsys, "auto")
    assert (status, joined) == (1, [])
    assert errors.startswith("No Ray cluster was named or announced. Pass the address of one, set RAY_ADDRESS, or ")
    file = tmp_path / "ray" / "ray_current_cluster"
    file.write_text("10.0.0.1:6379\n")
    assert attach(capsys, "auto") == (0, "")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert attach(capsys, "auto") == (0, "")
    assert attach(capsys, "10.0.0.3:6379") == (0, "")
    # Without an address, Ray takes the announced one.
    assert joined == [None, "10.0.0.2:6379", "10.0.0.3:6379"]
    if os.getuid() == 0:
        os.chown(file, 12345, 12345)
        assert private.announced_address() is None


def test_ray_client(joined, capsys, monkeypatch):
    """An address of Ray Client is refused by name, and so is a connection that somebody else has made."""
    refusal = "'ray://10.0.0.1:10001' is an address of Ray Client, which Fairlead does not support. Run the driver on "
    status, errors = attach(capsys, "ray://10.0.0.1:10001")
    assert (status, errors.startswith(refusal)) == (1, True)
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    status, errors = attach(capsys, "auto")
    assert (status, errors.startswith(refusal)) == (1, True)
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(rpc, "is_client", lambda: True)
    status, errors = attach(capsys, "10.0.0.1:6379")
    assert (status, joined) == (1, ["10.0.0.1:6379"])
    assert errors.startswith("This process is connected to Ray through Ray Client, which Fairlead does not support.")


def test_missing_parts_of_ray(monkeypatch):
    """Without these parts of Ray nothing counts as announced, and no connection as one of Ray Client."""
    assert private.is_client() is False
    monkeypatch.setitem(sys.modules, "ray.util.client", None)
    assert private.is_client() is False
    monkeypatch.setitem(sys.modules, "ray._private.utils", None)
    assert private.announced_address() is None
