# SPDX-License-Identifier: Apache-2.0
"""What Fairlead reads of private parts of Ray, on the Ray that runs."""

import os

import pytest
import ray
from ray.exceptions import RayActorError

from fairlead_workergroup._ray_private import is_known_dead


@ray.remote(num_cpus=0)
class Mortal:
    def die(self):
        os._exit(1)


def test_is_known_dead(local_ray):
    """An actor is known to be dead once a request has met its death."""
    actor, other = Mortal.remote(), Mortal.remote()
    ray.get([one.__ray_ready__.remote() for one in (actor, other)])
    assert not is_known_dead(actor)
    with pytest.raises(RayActorError):
        ray.get(actor.die.remote())
    assert is_known_dead(actor)
    assert not is_known_dead(other)
    ray.kill(other)
