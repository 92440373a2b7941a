# SPDX-License-Identifier: Apache-2.0
"""Ray's head (GCS) does not answer: every command returns in time."""

from types import SimpleNamespace

import pytest
import ray

from fairlead_inspect import _command
from fairlead_placement import RayVirtualCluster
from fairlead_placement import _terminal as terminal
from fairlead_placement._nodes import head as placement_head
from fairlead_workergroup import RayWorkerGroup

pytestmark = pytest.mark.nightly

# The limit of everything that has none of its own, and of the commands.
LIMIT_S, ANSWER_S = 1.0, 60.0
COMMANDS = (["ps"], ["stacks"], ["why"])


@pytest.mark.usefixtures("local_ray")
def test_every_command(monkeypatch, call_in_time, stop_process, capsys):
    """Every command says that the head does not answer."""
    for name in ("LEAST_S", "ALIVE_S", "HEAD_S"):
        monkeypatch.setattr(placement_head, name, LIMIT_S)
    # The commands use the Ray of this process.
    monkeypatch.setattr(terminal, "attach_to", lambda *_, **__: None)
    monkeypatch.setattr(terminal, "os", SimpleNamespace(_exit=lambda status: None))
    head = ray._private.worker._global_node.all_processes["gcs_server"][0].process.pid
    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, "collections.Counter"),
        stop_process(head),
    ):
        commands = {str(one): lambda one=one: _command.main(one) for one in COMMANDS}
        assert set(call_in_time(commands, ANSWER_S).values()) == {3}
        assert capsys.readouterr().err.count("Ray's head (GCS) did not answer") == len(COMMANDS)
