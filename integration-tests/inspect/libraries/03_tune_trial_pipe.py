# SPDX-License-Identifier: Apache-2.0
"""Tune runs three trials; the one with momentum 0.9 reads from a pipe into which nobody writes."""

import os

from hangs import mark, start_ray
from ray import tune

TRUTH = {
    "hangs": True,
    "library": "tune",
    "guilty": "Trainable process of the trial with momentum 0.9",
    "function": "step",
    "note": "os.read of an empty pipe whose write end is open",
}


class Regressor(tune.Trainable):
    def setup(self, config):
        self.momentum = config["momentum"]
        self.loss = 10.0
        self.reader, self.writer = os.pipe()

    def step(self):
        self.loss *= 0.7
        if self.momentum < 0.9 or self.iteration < 3:
            os.write(self.writer, b"metrics!")
        else:
            mark()
        os.read(self.reader, 8)
        return {"loss": self.loss}

    def save_checkpoint(self, checkpoint_dir):
        return None


if __name__ == "__main__":
    start_ray(num_cpus=3, object_store_memory=400_000_000)
    tuner = tune.Tuner(
        Regressor,
        param_space={"momentum": tune.grid_search([0.0, 0.5, 0.9])},
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=tune.RunConfig(storage_path=os.path.abspath("results"), stop={"training_iteration": 8}),
    )
    print(tuner.fit().get_best_result().config)
