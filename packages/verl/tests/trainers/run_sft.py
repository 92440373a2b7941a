# SPDX-License-Identifier: Apache-2.0
"""Run verl's SFT trainer on the CPU: `run_sft.py FOLDER WORKERS STEPS`. Its metrics go to VERL_FILE_LOGGER_PATH.

With `stop` as the last argument, rank 1 stops itself in the middle of a step, before a collective.
`started.json` has the workers' processes and the address of Ray. If the trainer fails, `raised.json` has the error and
the time.
"""

import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

import fairlead_logical_gpus_pytest  # noqa: F401  a private cluster with logical GPUs
import ray
import torch
from verl.trainer import sft_trainer_ray
from whose_classes import check_classes

FOLDER, WORKERS, STEPS = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
STOPS = sys.argv[-1] == "stop"


def stop_later(_):
    """Stop this worker before its tenth reduction."""
    reduce, calls = torch.distributed.all_reduce, itertools.count(1)

    def stop(*args, **kwargs):
        if next(calls) == 10:
            os.kill(os.getpid(), signal.SIGSTOP)
        return reduce(*args, **kwargs)

    torch.distributed.all_reduce = stop


class Trainer(sft_trainer_ray.SFTTrainer):
    """verl's trainer, between a look at its workers and the record of its failure."""

    def fit(self):
        started = {"pids": check_classes(self.training_client), "address": ray.get_runtime_context().gcs_address}
        (FOLDER / "started.json").write_text(json.dumps(started))
        if STOPS:
            ray.get(self.training_client.workers[1].__ray_call__.remote(stop_later))
        try:
            super().fit()
        except Exception as error:
            raised = {"at": time.time(), "type": type(error).__name__, "text": str(error)}
            (FOLDER / "raised.json").write_text(json.dumps(raised))
            raise


sft_trainer_ray.SFTTrainer = Trainer
sys.argv[1:] = [
    f"model.path={FOLDER}/model",
    "model.use_remove_padding=False",
    "model.enable_gradient_checkpointing=False",
    "++model.override_config.attn_implementation=eager",
    f"data.train_files={FOLDER}/sft.parquet",
    "data.train_batch_size=16",
    "data.micro_batch_size_per_gpu=4",
    "data.use_dynamic_bsz=False",
    "data.max_length=32",
    "data.pad_mode=no_padding",
    "engine.strategy=fsdp2",
    "engine.use_torch_compile=False",
    "++engine.model_dtype=fp32",
    "++engine.dtype=float32",
    "optim.lr=1e-2",
    "trainer.device=cpu",
    f"trainer.n_gpus_per_node={WORKERS}",
    f"trainer.total_training_steps={STEPS}",
    f"trainer.total_epochs={STEPS}",
    "trainer.logger=[file]",
    "trainer.resume_mode=disable",
    "trainer.save_freq=-1",
    "trainer.test_freq=-1",
    f"trainer.default_local_dir={FOLDER}/checkpoints",
    f"hydra.run.dir={FOLDER}/hydra",
]
if __name__ == "__main__":
    sft_trainer_ray.main()
