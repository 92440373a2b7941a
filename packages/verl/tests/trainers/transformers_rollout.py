# SPDX-License-Identifier: Apache-2.0
"""A rollout of verl that generates with transformers on the CPU.

verl's own hook loads it in every process: VERL_USE_EXTERNAL_MODULES=fairlead_logical_gpus,transformers_rollout.
"""

import zlib
from collections import Counter

import ray
import torch
from torch.distributed.tensor import DTensor
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

NAME = "transformers_rollout_{}"


@ray.remote(num_cpus=0.1)
class Server:
    """The model that generates, one for each replica."""

    def __init__(self, path):
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.global_steps = None
        self.seen = Counter()

    def load(self, weights, global_steps):
        self.model.load_state_dict({name: value.float() for name, value in weights.items()})
        self.global_steps = global_steps
        self.seen.clear()

    def generate(self, prompt_ids, sampling_params, **_):
        """Sample. Each sample of a prompt has its own seed, which is the same in each run."""
        prompt = list(prompt_ids)
        self.seen[tuple(prompt)] += 1
        torch.manual_seed(zlib.crc32(f"{prompt} {self.seen[tuple(prompt)]} {self.global_steps}".encode()))
        with torch.no_grad():
            row = self.model.generate(
                torch.tensor([prompt]), max_new_tokens=8, do_sample=True, top_k=0, pad_token_id=0
            )[0]
        tokens = row[len(prompt) :].tolist()
        return TokenOutput(
            token_ids=tokens,
            log_probs=[0.0] * len(tokens),
            stop_reason="completed",
            extra_fields={"global_steps": self.global_steps},
        )

    def do_nothing(self, *_, **__):
        """Accept the calls that a server of an accelerator needs."""

    wake_up = sleep = abort_all_requests = resume_generation = do_nothing
    clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = do_nothing


class Replica(RolloutReplica):
    """One server, by its name."""

    async def launch_servers(self):
        server = Server.options(name=NAME.format(self.replica_rank)).remote(self.model_config.path)
        self.servers, self._server_handle, self._server_address = [server], server, f"cpu:{self.replica_rank}"


class Rollout(base.BaseRollout):
    """A worker's end, which sends the weights to all servers."""

    async def resume(self, tags):
        """Do nothing."""

    async def release(self):
        """Do nothing."""

    async def update_weights(self, weights, wire_format="named_tensors", global_steps=None, **_):
        full = {}
        for name, value in weights:
            full[name] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        if torch.distributed.get_rank() != 0:
            return
        boxed, replica = ray.put(full), 0
        while server := find_server(replica):
            await server.load.remote(boxed, global_steps)
            replica += 1


def find_server(replica):
    """Return the server of a replica, or None."""
    try:
        return ray.get_actor(NAME.format(replica))
    except ValueError:
        return None


base._ROLLOUT_REGISTRY["transformers", "async"] = "transformers_rollout.Rollout"
RolloutReplicaRegistry.register("transformers", lambda: Replica)
