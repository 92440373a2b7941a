# SPDX-License-Identifier: Apache-2.0
"""Teach a small Llama to add with GRPO: one controller, two groups of workers on the same slots.

The group `policy` trains under FSDP2, which shards its parameters over `dp`. The group `generation` samples answers;
each of its workers holds the whole model. Each step sends the weights from `policy` to `generation` through a `Link`,
and samples 16 answers to each problem. A correct answer earns a reward of 1, any other answer 0. The policy then takes
two clipped steps on advantages that are normalised over the answers to one problem (Shao et al., 2024; averaged over
tokens, without a KL term).

The task is to continue "87+5=" with "29;", the digits of the sum, lowest first. A Llama of 224,000 parameters with
random weights almost never samples a correct answer, and without a reward it learns nothing. So `policy` first imitates
solved problems, until about a fifth of its samples are correct. The reward curve starts after that. Training and
evaluation use the same 1,000 problems. The example shows that the loop works, not that the model generalises.

    pip install torch transformers matplotlib
    python examples/grpo.py
"""

import argparse
import hashlib
import os
import random
import sys
import time
from functools import partial

import numpy as np
import ray
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaConfig, LlamaForCausalLM

from fairlead_batching import BatchedDataDict, DynamicBatchingArgs, RemoteBatch
from fairlead_placement import PlacementError, RayVirtualCluster, init_ray
from fairlead_sharding import NamedSharding
from fairlead_transfer import Link
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, Shard, Timeouts, current_worker
from fairlead_workergroup.torch import destroy, init_process_group

CHARS = "0123456789+=;"
END = CHARS.index(";")  # ends an answer; also the padding
ANSWER, WIDTH = len("801;"), len("99+9=801;")  # maximum lengths of an answer and of a sequence
# Number of steps of a full run, and how much its mean reward must rise from the first fifth to the last.
STEPS, GAIN = 250, 0.2
PROBLEMS, ANSWERS = 32, 16  # problems per step, answers per problem
MINIBATCH = 256  # sequences per optimizer step, over all ranks
IMITATION_LOSS = 0.75  # nats per token at which imitation ends
CLIP = 0.2
# The cost of a transformer of width 96: 24 * 96**2 operations per token, and 4 * 96 per pair of tokens.
BATCHING = DynamicBatchingArgs(
    max_tokens_per_microbatch=512,
    sequence_length_round=2,
    input_key="tokens",
    input_lengths_key="length",
    cost=(6 * 96, 1),
)
# A batch of n sequences, padded on the right to one width, has these leaves. Column t refers to token t.
#   tokens (n, width)
#   length (n,)
#   mask (n, width): 1.0 where a token belongs to the answer, else 0.0
#   log_probs (n, width): log-probabilities of the tokens before the policy is trained on them
#   advantages (n,)


def make_llama(width: int = 96, heads: int = 4, layers: int = 2) -> LlamaForCausalLM:
    """Return a Llama with random weights.

    It needs no mask for padding, because padding on the right does not affect tokens before it.
    """
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(CHARS),
            hidden_size=width,
            intermediate_size=8 * width // 3,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=WIDTH,
            use_cache=False,
        )
    )


def next_log_probs(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the log-probabilities of the token after each token: (n, t) -> (n, t, len(CHARS))."""
    return F.log_softmax(model(input_ids=tokens).logits, dim=-1)


def log_probs_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the log-probability of each token given the tokens before it, and 0 for the first token."""
    return F.pad(next_log_probs(model, tokens[:, :-1]).gather(2, tokens[:, 1:, None]).squeeze(2), (1, 0))


def imitation_loss(log_probs: Tensor, batch: BatchedDataDict) -> Tensor:
    return -log_probs


def grpo_loss(log_probs: Tensor, batch: BatchedDataDict) -> Tensor:
    ratio, advantages = (log_probs - batch["log_probs"]).exp(), batch["advantages"][:, None]
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)


LOSSES = {"imitate": imitation_loss, "grpo": grpo_loss}  # loss of each token: (n, t), batch -> (n, t)


class Worker:
    """Base class of both kinds of workers. It holds a model."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)  # Several processes share the cores of the machine.
        torch.manual_seed(seed)
        self.model = make_llama()

    def weights(self) -> dict[str, Tensor]:
        """Return the part of each parameter that this worker holds."""
        return self.model.state_dict()

    def fingerprint(self) -> str:
        """Return a digest of the whole parameters. Under FSDP2 this is a collective."""
        whole = (value.full_tensor() if isinstance(value, DTensor) else value for value in self.weights().values())
        return hashlib.sha256(torch.cat([value.flatten() for value in whole]).numpy()).hexdigest()


class Policy(Worker):
    """A worker that holds its shard of the parameters, and trains on its shard of the batch."""

    def connect(self) -> int:
        """Join the process group, shard the parameters, and return their number."""
        init_process_group()
        mesh = current_worker().sharding.to_device_mesh("cpu")
        self.dp = mesh.get_group("dp")
        for module in (*self.model.model.layers, self.model):
            fully_shard(module, mesh=mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        return sum(parameter.numel() for parameter in self.model.parameters())

    def train(self, handle: RemoteBatch, lr: float) -> float:
        """Fetch a shard, and take an optimizer step for each group of it.

        Returns:
            This rank's share of the mean loss per token in the last step.
        """
        shard = handle.fetch()
        loss_of, self.optimizer.param_groups[0]["lr"] = LOSSES[shard.meta["objective"]], lr
        for number in range(len(shard.micro_batch_indices)):
            group, share = shard.get_batch(number), 0.0
            tokens = group["mask"].sum()
            dist.all_reduce(tokens, group=self.dp)
            self.optimizer.zero_grad()
            # Every backward() is a collective. All ranks have the same number of microbatches, so no rank hangs.
            sequences = [key for key in ("tokens", "mask", "log_probs") if key in group]
            for batch in group.make_microbatch_iterator_with_dynamic_shapes(sequence_keys=sequences):
                loss = (loss_of(log_probs_of(self.model, batch["tokens"]), batch) * batch["mask"]).sum() / tokens
                # FSDP2 averages over the ranks, but the gradient of the mean over all tokens is a sum over the ranks.
                (loss * dist.get_world_size(self.dp)).backward()
                share += loss.item()
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        return share

    def log_probs(self, shard: BatchedDataDict) -> BatchedDataDict:
        """Return the log-probabilities of the shard's tokens under the current weights."""
        with torch.no_grad():
            parts = shard.make_microbatch_iterator_with_dynamic_shapes(sequence_keys="tokens")
            batches = [batch["tokens"] for batch in parts]
            return BatchedDataDict.from_batches({"log_probs": log_probs_of(self.model, tokens)} for tokens in batches)

    def disconnect(self) -> None:
        destroy()


class Generation(Worker):
    """A worker that answers problems with the weights that it loaded last."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.model.requires_grad_(False)
        torch.manual_seed(1000 * seed + current_worker().rank)  # Each rank samples different answers.

    def generate(self, prompts: BatchedDataDict, greedy: bool = False) -> BatchedDataDict:
        """Return one answer to each prompt: sampled at temperature 1, or the most likely one if `greedy`."""
        tokens, length = encode(prompts["prompt"])
        mask, log_probs = torch.zeros(tokens.shape), torch.zeros(tokens.shape)
        for _ in range(ANSWER):
            open_ = (tokens.gather(1, length[:, None] - 1).squeeze(1) != END).nonzero().squeeze(1)
            if not len(open_):
                break
            of_next = next_log_probs(self.model, tokens[open_, : length.max()])[
                torch.arange(len(open_)), length[open_] - 1
            ]
            chosen = of_next.argmax(1) if greedy else of_next.exp().multinomial(1).squeeze(1)
            at = open_, length[open_]
            tokens[at], mask[at] = chosen, 1.0
            log_probs[at] = of_next.gather(1, chosen[:, None]).squeeze(1)
            length[open_] += 1
        return BatchedDataDict(tokens=tokens, length=length, mask=mask, log_probs=log_probs)


def encode(texts: list[str]) -> tuple[Tensor, Tensor]:
    """Return the padded tokens (n, WIDTH) and the lengths (n,) of the texts."""
    tokens = [[CHARS.index(char) for char in text.ljust(WIDTH, CHARS[END])] for text in texts]
    return torch.tensor(tokens), torch.tensor([len(text) for text in texts])


def solution(prompt: str) -> str:
    one, other = prompt.rstrip("=").split("+")
    return str(int(one) + int(other))[::-1] + ";"


def problems(rng: random.Random, count: int) -> list[str]:
    """Return random prompts. In about half of them the first number has one digit."""
    return [f"{rng.randrange(rng.choice((10, 100)))}+{rng.randrange(10)}=" for _ in range(count)]


def train(policy: RayWorkerGroup, batch: BatchedDataDict, objective: str, *, lr: float, dp: int) -> list[float]:
    """Store the batch, and take an optimizer step for each minibatch. Each worker fetches its own shard.

    Returns:
        Each rank's share of the mean loss per token in the last step.
    """
    batch.meta["objective"] = objective
    handle = RemoteBatch.put(batch, lengths_key="length")
    shards, _ = handle.shard_by_batch_size(dp, MINIBATCH, dynamic_batching_args=BATCHING)
    return policy.call("train", Shard(shards, "dp"), lr).result()


def imitate(policy: RayWorkerGroup, rng: random.Random, *, dp: int, at_most: int = 400) -> int:
    """Train the policy on solved problems until its loss is low enough, and return the number of steps."""
    for step in range(1, at_most + 1):
        prompts = problems(rng, MINIBATCH)
        tokens, length = encode([prompt + solution(prompt) for prompt in prompts])
        column, prompt_length = torch.arange(WIDTH), torch.tensor([[len(prompt)] for prompt in prompts])
        mask = ((column >= prompt_length) & (column < length[:, None])).float()
        shares = train(policy, BatchedDataDict(tokens=tokens, length=length, mask=mask), "imitate", lr=1e-3, dp=dp)
        if sum(shares) < IMITATION_LOSS:
            return step
    raise RuntimeError(f"The loss is still above {IMITATION_LOSS} after {at_most} steps of imitation.")


def send_weights(link: Link, policy: RayWorkerGroup, generation: RayWorkerGroup) -> None:
    """Send the policy's weights to the generation workers, from process to process.

    Raises:
        RuntimeError: If the weights changed on the way.
    """
    link.send(0 if link.version is None else link.version + 1, timeout=120)
    fingerprints = {*generation.call("fingerprint").result(), *policy.call("fingerprint").result()}
    if len(fingerprints) > 1:
        raise RuntimeError(f"The weights differ between workers: {fingerprints}.")


def generate(generation: RayWorkerGroup, prompts: BatchedDataDict, *, dp: int, greedy: bool = False) -> BatchedDataDict:
    """Return answers in the order of the prompts, as wide as the longest sequence."""
    shards = Shard(prompts.shard_by_batch_size(dp, allow_uneven_shards=True), "dp")
    answers = BatchedDataDict.from_batches(generation.call("generate", shards, greedy=greedy, collect="dp").result())
    answers.truncate_tensors(1, int(answers["length"].max()))
    return answers


def rewards_of(prompts: BatchedDataDict, answers: BatchedDataDict) -> Tensor:
    """Return 1 for each correct answer, including its end marker, and 0 for any other."""
    texts = ["".join(CHARS[t] for t in row[m > 0]) for row, m in zip(answers["tokens"], answers["mask"], strict=True)]
    return torch.tensor([float(text == solution(of)) for text, of in zip(texts, prompts["prompt"], strict=True)])


def log_probs_before(policy: RayWorkerGroup, answers: BatchedDataDict, *, dp: int) -> Tensor:
    """Return the policy's log-probabilities of the answers, and check that generation sampled with the same ones."""
    shards, order = answers.shard_by_batch_size(dp, dynamic_batching_args=BATCHING)
    log_probs = order.restore(policy.call("log_probs", Shard(shards, "dp"), collect="dp").result())["log_probs"]
    mask = answers["mask"]
    torch.testing.assert_close(log_probs * mask, answers["log_probs"] * mask, rtol=0, atol=1e-4)
    return log_probs


def grpo_step(link: Link, policy: RayWorkerGroup, generation: RayWorkerGroup, rng: random.Random, *, dp: int) -> float:
    """Sample answers, compute their rewards and train on them. Return the mean reward."""
    send_weights(link, policy, generation)
    prompts = BatchedDataDict(prompt=problems(rng, PROBLEMS)).repeat_interleave(ANSWERS)
    answers = generate(generation, prompts, dp=dp)
    rewards = rewards_of(prompts, answers).view(PROBLEMS, ANSWERS)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    log_probs = log_probs_before(policy, answers, dp=dp)
    answers = answers.drop("log_probs").union({"advantages": advantages.flatten(), "log_probs": log_probs})
    train(policy, answers, "grpo", lr=5e-4, dp=dp)
    return rewards.mean().item()


def accuracy(link: Link, policy: RayWorkerGroup, generation: RayWorkerGroup, *, dp: int) -> float:
    """Return the share of all problems that the policy solves with its most likely answers."""
    send_weights(link, policy, generation)
    prompts = BatchedDataDict(prompt=[f"{one}+{other}=" for one in range(100) for other in range(10)])
    return rewards_of(prompts, generate(generation, prompts, dp=dp, greedy=True)).mean().item()


def learn(policy: RayWorkerGroup, generation: RayWorkerGroup, *, steps: int, seed: int) -> list[float]:
    """Run imitation, then GRPO. Return the mean reward of each GRPO step."""
    dp, rng, console = policy.sharding_annotations.get_axis_size("dp"), random.Random(seed), Console()
    rewards: list[float] = []
    link = Link(policy, generation, source="weights", target="weights")
    with link, Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("Imitation", total=None)
        size = policy.call("connect").result()[0]
        console.print(f"{size:,} parameters; {imitate(policy, rng, dp=dp)} steps of imitation")
        before = accuracy(link, policy, generation, dp=dp)
        progress.update(task, total=steps)
        for step in range(1, steps + 1):
            rewards.append(grpo_step(link, policy, generation, rng, dp=dp))
            progress.update(task, advance=1, description=f"GRPO, reward {np.mean(rewards[-10:]):.2f}")
            if step % max(steps // 10, 1) == 0:
                console.print(f"step {step:4}  reward {np.mean(rewards[-max(steps // 10, 1) :]):.3f}")
        console.print(f"accuracy {before:.1%} -> {accuracy(link, policy, generation, dp=dp):.1%}")
        moved = link.explain().plan.bytes_moved * (steps + 2) / 1e6
        console.print(f"{moved:,.0f} MB of weights went from policy to generation, none of it through the driver")
    return rewards


def draw(runs: dict[str, list[float]], path: str, title: str, window: int = 10) -> None:
    """Draw the reward curves of some runs as a PNG."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="mean reward", ylim=(0, 1), title=title)
    for name, rewards in runs.items():
        steps = range(1, len(rewards) + 1)
        (line,) = axes.plot(steps, rewards, alpha=0.35, label=name)
        means = [np.mean(rewards[max(end - window, 0) : end]) for end in steps]
        axes.plot(steps, means, color=line.get_color(), label=f"{name}, mean of {window} steps")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="number of GRPO steps")
    parser.add_argument("--dp", type=int, default=2, choices=(1, 2, 4, 8), help="number of workers in each group")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", default="grpo-rewards.png", help="file for the reward curve")
    own = os.environ.get("RAY_ADDRESS") or "local"
    parser.add_argument("--address", default=own, help="address of a Ray cluster (default: RAY_ADDRESS, or a new one)")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"argument --steps: must be at least 1, got {options.steps}")

    began = time.monotonic()
    make = partial(
        RayWorkerGroup, sharding_annotations=NamedSharding.from_shape(dp=options.dp), timeouts=Timeouts(call_s=120)
    )
    try:
        init_ray(address=options.address, num_cpus=2 * options.dp)
        with (
            RayVirtualCluster([options.dp], use_gpus=False, enable_colocation=True, reserve_timeout_s=30) as cluster,
            make(cluster, RayWorkerBuilder(Policy, options.seed), name_prefix="policy") as policy,
            make(cluster, RayWorkerBuilder(Generation, options.seed), name_prefix="generation") as generation,
        ):
            cluster.print_all_worker_groups()
            rewards = learn(policy, generation, steps=options.steps, seed=options.seed)
            policy.shutdown(cleanup_method="disconnect")
    except (PlacementError, ValueError) as error:
        Console(stderr=True).print(f"grpo: {error}", markup=False, highlight=False)
        return 1
    finally:
        ray.shutdown()
    draw({"reward": rewards}, options.plot, "GRPO: share of correct answers")
    fifth = max(len(rewards) // 5, 1)
    first, last = np.mean(rewards[:fifth]), np.mean(rewards[-fifth:])
    print(f"reward {first:.3f} -> {last:.3f} (first and last fifth; a full run must gain at least {GAIN})")
    print(f"wrote the reward curve to {options.plot} after {time.monotonic() - began:.0f} s")
    return 0 if last - first >= GAIN or options.steps < STEPS else 1


if __name__ == "__main__":
    sys.exit(main())
