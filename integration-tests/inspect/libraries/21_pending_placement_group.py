# SPDX-License-Identifier: Apache-2.0
"""A second experiment asks for a placement group while the first one holds most of the CPUs."""

import ray
from hangs import mark, start_ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

TRUTH = {
    "hangs": True,
    "library": "core (placement groups)",
    "guilty": "nobody: the placement group second_experiment is pending",
    "function": None,
    "pending": "second_experiment",
    "note": "6 of 8 CPUs are reserved by first_experiment, which is not removed",
}


@ray.remote(num_cpus=2)
class Trainer:
    def fit(self, seed):
        return seed * 2


def experiment(name):
    group = placement_group([{"CPU": 2}] * 3, strategy="PACK", name=name)
    if name == "second_experiment":
        mark(pending=name)
    ray.get(group.ready())
    strategy = PlacementGroupSchedulingStrategy(placement_group=group)
    trainers = [Trainer.options(scheduling_strategy=strategy).remote() for _ in range(3)]
    return trainers, ray.get([trainer.fit.remote(i) for i, trainer in enumerate(trainers)])


if __name__ == "__main__":
    start_ray(num_cpus=8, object_store_memory=400_000_000)
    first = experiment("first_experiment")
    print(first[1], flush=True)
    second = experiment("second_experiment")
    print(second[1], flush=True)
