# SPDX-License-Identifier: Apache-2.0
"""Run verl's default GRPO trainer on the CPU: `run_grpo.py FOLDER WORKERS STEPS`.

The actor, the reference and the rollout share the workers. Metrics go to VERL_FILE_LOGGER_PATH.
"""

import os
import sys
from pathlib import Path

import fairlead_logical_gpus_pytest  # noqa: F401  a private cluster with logical GPUs

os.environ["VERL_USE_EXTERNAL_MODULES"] += ",transformers_rollout"

import ray
import transfer_queue
from verl.trainer import main_ppo
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from whose_classes import WANTED, check_classes, name_modules

FOLDER, WORKERS, STEPS = Path(sys.argv[1]), sys.argv[2], sys.argv[3]


class OrderedBuffer(ReplayBuffer):
    """verl's buffer, with the samples of a batch ordered by their tokens.

    verl's own order is that of their arrival, and another order rounds the sums of gradients differently.
    """

    def _materialize_batch(self, partition_id, *arguments):
        batch = super()._materialize_batch(partition_id, *arguments)
        data = transfer_queue.kv_batch_get(
            keys=batch.keys, partition_id=partition_id, select_fields=["prompts", "responses"]
        )
        tokens = [
            (prompt.tolist(), response.tolist())
            for prompt, response in zip(data["prompts"], data["responses"], strict=True)
        ]
        order = sorted(range(len(tokens)), key=tokens.__getitem__)
        keys, tags = ([values[row] for row in order] for values in (batch.keys, batch.tags))
        return transfer_queue.KVBatchMeta(partition_id=partition_id, keys=keys, tags=tags)


class TaskRunner(main_ppo.TaskRunnerV1.__ray_actor_class__):
    """verl's, which makes the worker groups, with a look at them."""

    def run(self, config):
        trainer_base.ReplayBuffer = OrderedBuffer
        super().run(config)

    def init_agent_loop_manager(self):
        check_classes(self.trainer.actor_rollout_wg)
        super().init_agent_loop_manager()


main_ppo.TaskRunnerV1 = ray.remote(TaskRunner)
actor, rollout, reference = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref"))
sys.argv[1:] = [
    "algorithm.adv_estimator=grpo",
    f"data.train_files={FOLDER}/grpo.parquet",
    f"data.val_files={FOLDER}/grpo.parquet",
    "data.train_batch_size=4",
    "data.max_prompt_length=16",
    "data.max_response_length=8",
    "data.dataloader_num_workers=0",
    f"actor_rollout_ref.model.path={FOLDER}/model",
    "actor_rollout_ref.model.use_remove_padding=False",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "++actor_rollout_ref.model.override_config.attn_implementation=eager",
    f"{actor}.strategy=fsdp2",
    f"{actor}.fsdp_config.use_torch_compile=False",
    f"{actor}.use_torch_compile=False",
    f"{actor}.use_kl_loss=False",
    f"{actor}.optim.lr=1e-3",
    f"{actor}.ppo_mini_batch_size=4",
    f"{actor}.ppo_micro_batch_size_per_gpu=2",
    f"{rollout}.name=transformers",
    f"{rollout}.mode=async",
    f"{rollout}.n=2",
    f"{rollout}.tensor_model_parallel_size={WORKERS}",
    f"{rollout}.agent.num_workers=1",
    f"{rollout}.free_cache_engine=False",
    f"{rollout}.log_prob_micro_batch_size_per_gpu=2",
    f"{reference}.strategy=fsdp2",
    f"{reference}.fsdp_config.use_torch_compile=False",
    f"{reference}.log_prob_micro_batch_size_per_gpu=2",
    f"reward.custom_reward_function.path={Path(__file__).parent}/reward.py",
    "reward.custom_reward_function.name=score",
    "reward.num_workers=1",
    "trainer.logger=[file]",
    "trainer.nnodes=1",
    f"trainer.n_gpus_per_node={WORKERS}",
    "trainer.device=cpu",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.resume_mode=disable",
    "trainer.total_epochs=1",
    f"trainer.total_training_steps={STEPS}",
    f"trainer.default_local_dir={FOLDER}/checkpoints",
    "ray_kwargs.ray_init.num_cpus=100",
    f"hydra.run.dir={FOLDER}/hydra",
]
if __name__ == "__main__":
    assert name_modules() == WANTED
    main_ppo.main()
