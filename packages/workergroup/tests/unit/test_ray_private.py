# SPDX-License-Identifier: Apache-2.0
"""What the wrappers of Ray's private API return on a Ray that lacks it (seam: the attribute is removed)."""

from types import SimpleNamespace

import ray

from fairlead_workergroup import _ray_private as private
from fairlead_workergroup._replies import task_of

# The layout of Ray's ids: 12 random bytes and the job make an actor id, 8 more bytes a task id, 4 more an object id.
ACTOR = b"a" * 12 + b"\1\0\0\0"
TASK = b"t" * 8 + ACTOR
REF = ray.ObjectRef(TASK + b"\1\0\0\0")


def test_is_known_dead(monkeypatch):
    """No actor is known to be dead."""
    monkeypatch.setattr(ray._private.worker.global_worker, "core_worker", object(), raising=False)
    assert not private.is_known_dead(SimpleNamespace(_actor_id=ray.ActorID(ACTOR)))


def test_ids_of_a_reference():
    """They are parts of the object's id, and Ray's own method returns the same."""
    assert REF.task_id().binary() == TASK
    assert task_of(REF) == TASK
    assert private.actor_id_of_ref(REF) == ACTOR.hex()


def test_actor_tables(monkeypatch):
    """No actor is found, and Ray is not started to find out."""
    monkeypatch.setattr(ray._private.state, "state", object())
    assert private.find_actors("DEAD") == frozenset()
    assert not ray.is_initialized()


def test_how_it_ended():
    """Without the text of this version of Ray both are unknown; the output of the worker is not that text."""
    assert private.how_it_ended(RuntimeError("The actor died.")) == (None, None)
    assert private.how_it_ended(RuntimeError("It died.\nLast log: Worker exits with an exit code 4")) == (None, None)
