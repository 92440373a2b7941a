# SPDX-License-Identifier: Apache-2.0
"""A cluster with token authentication, whose address is named by hand."""

import os
import subprocess
import sys

import pytest

TOKEN = "0123456789abcdef" * 4


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The address of a cluster that wants a token."""
    source = """
        import ray, sys
        print("address", ray.init(address="local", num_cpus=1, include_dashboard=False).address_info["gcs_address"])
        sys.stdout.flush()
        sys.stdin.read()
    """
    script = tmp_path_factory.mktemp("cluster") / "cluster.py"
    script.write_text("\n".join(line.strip() for line in source.splitlines()))
    env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    with subprocess.Popen([sys.executable, str(script)], env=env, stdin=-1, stdout=-1, text=True) as cluster:
        yield next(line for line in cluster.stdout if line.startswith("address")).split()[1]
        cluster.stdin.close()
        cluster.wait(60)


@pytest.mark.parametrize(
    ("kept", "mode", "status"),
    [(TOKEN, None, 0), (TOKEN, "token", 0), (TOKEN, "disabled", 3), ("f" * 64, None, 3), (None, None, 3)],
    ids=["found", "configured", "disabled", "another", "none"],
)
def test_named_address(address, tmp_path, kept, mode, status):
    """The user's token is found for a named address too; else the error says what to set."""
    if kept is not None:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text(kept)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    env |= {"HOME": str(tmp_path)} | ({} if mode is None else {"RAY_AUTH_MODE": mode})
    command = [sys.executable, "-m", "fairlead_inspect", "ps", "--address", address, "--timeout", "60"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == status, done.stderr
    assert ("RAY_AUTH_MODE=token and RAY_AUTH_TOKEN" in done.stderr) is (status == 3)
    assert "Traceback" not in done.stderr
    if status == 0:
        assert done.stderr == ""
