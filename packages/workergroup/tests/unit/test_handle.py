# SPDX-License-Identifier: Apache-2.0
"""What a handle of a group knows of its class and of its cluster, without Ray."""

import json
import pickle
from types import SimpleNamespace

import pytest
import ray

from fairlead_workergroup import GroupHandle, WorkerGroupError
from fairlead_workergroup._calls.handle import GroupIdentity
from fairlead_workergroup._start.worker_class import WorkerClass, describe_class

SECRET = "secret-in-a-default"


class Model:
    def loss(self, batch, /, scale=SECRET, *rest, strict=True, **more):
        return batch

    async def fetch(self, path):
        return path

    def tokens(self, count):
        yield count


def test_published_class():
    """The published description of a class has the parameters of its methods, and not the values of defaults."""
    described = describe_class(Model, asks=[], node_id="", runtime_env=None, timeout_s=1.0)
    published = described.to_dict()
    assert SECRET not in json.dumps(published)
    read = WorkerClass.from_dict(pickle.loads(pickle.dumps(published)))
    assert (read.name, read.concurrent, read.cls) == ("Model", False, None)
    assert {name: (one.kind, str(one.signature)) for name, one in read.methods.items()} == {
        name: (one.kind, str(one.signature)) for name, one in described.methods.items()
    }
    assert str(read.method("loss").signature) == "(batch, /, scale=..., *rest, strict=..., **more)"
    assert read.method(Model.tokens).result == "items"
    with pytest.raises(TypeError, match="loss"):
        read.method("loss").check(0, ())


def test_another_cluster(monkeypatch):
    """A handle that has come to a process of another cluster says so."""
    here = SimpleNamespace(get_session_name=lambda: "session_2", gcs_address="10.0.0.2:6379")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    handle = GroupHandle(GroupIdentity("policy", "ab" * 16, "01000000", "cd" * 28, "session_1", "10.0.0.1:6379"))
    assert repr(handle) == "GroupHandle('policy', 'ababab')"
    for use in (lambda: handle.call("loss", 1), handle.status, lambda: handle.epoch):
        with pytest.raises(WorkerGroupError, match=r"is on the cluster at 10\.0\.0\.1:6379, and this process is conn"):
            use()
