# SPDX-License-Identifier: Apache-2.0
"""Teach the Llama of `grpo.py` to add while generation runs ahead of training, and survive the loss of the driver.

A `Ledger` of fairlead-rollouts decides which prompts are generated and which groups of answers a step trains. While the
policy trains a step, the generation workers answer the prompts of later steps, with weights that are at most
`--staleness` versions old. A link sends the weights after each step. The synchronous run, to which the plot compares,
is the same loop with a staleness of 0.

Every few steps the driver writes a checkpoint: the parameters, the optimizer, and the ledger's snapshot in the same
folder. With `--kill`, SIGKILL ends the driver in the middle of a step, and another driver continues from the last
checkpoint. At the end the example checks that each prompt of the stream was trained once, relative to the checkpoint.

    pip install torch transformers matplotlib
    python examples/async_grpo.py --kill
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed.checkpoint as dcp
from grpo import ANSWERS, END, GAIN, PROBLEMS, STEPS, Generation, Policy, draw, imitate, problems, rewards_of, train
from matplotlib.figure import Figure
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fairlead_batching import BatchedDataDict
from fairlead_placement import RayVirtualCluster, init_ray
from fairlead_rollouts import Claim, Ledger, LedgerConfig, Ref
from fairlead_sharding import NamedSharding
from fairlead_transfer import Link
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, Shard, Timeouts

CHUNK = 8  # prompts that one call generates
Run = list[dict[str, Any]]  # a record for each step


class SavedPolicy(Policy):
    """A policy worker that can save its shard of the parameters and of the optimizer."""

    def save(self, folder: str) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: str) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


class Trainer:
    """Run the loop of one driver: generate ahead, train what the ledger claims, send weights, write checkpoints."""

    def __init__(self, options: argparse.Namespace, policy: RayWorkerGroup, generation: RayWorkerGroup) -> None:
        self.options, self.policy, self.generation = options, policy, generation
        self.folder = Path(options.driver)
        self.link = Link(policy, generation, source="weights", target="weights")
        # The stream ends with the run, so that at its end each prompt has a final fate.
        self.prompts = problems(random.Random(options.seed), options.steps * PROBLEMS)
        self.waiting: deque[tuple[list[Any], BatchedDataDict, Any]] = deque()

    def send_weights(self) -> None:
        self.link.send(0 if self.link.version is None else self.link.version + 1, timeout=120)

    def submit(self, ledger: Ledger) -> None:
        """Start to generate as many prompts as the ledger has room for."""
        while leases := ledger.lease(CHUNK):
            prompts = BatchedDataDict(prompt=[lease.prompt for lease in leases]).repeat_interleave(ANSWERS)
            shards = Shard(prompts.shard_by_batch_size(self.options.dp, allow_uneven_shards=True), "dp")
            self.waiting.append((leases, prompts, self.generation.call("generate", shards, collect="dp")))

    def finish(self, ledger: Ledger) -> None:
        """Wait for the call that began first, and report its answers."""
        leases, prompts, call = self.waiting.popleft()
        answers = BatchedDataDict.from_batches(call.result())
        rewards = rewards_of(prompts, answers).view(len(leases), ANSWERS)
        for number, lease in enumerate(leases):
            group = answers.slice(number * ANSWERS, (number + 1) * ANSWERS), rewards[number]
            ledger.finish_many([(lease, sample, Ref(group)) for sample in lease.samples])

    def claim(self, ledger: Ledger, step: int) -> Claim:
        """Return the groups of a step, and generate while they are not finished."""
        self.submit(ledger)
        while not isinstance(claim := ledger.claim(step, PROBLEMS), Claim):
            self.finish(ledger)
            self.submit(ledger)
        return claim

    def train(self, claim: Claim) -> float:
        """Take the optimizer steps of one step, and return the mean reward."""
        groups, rewards = zip(*(group.samples[0].ref.value for group in claim.groups), strict=True)
        batch = BatchedDataDict.from_batches(groups, {"tokens": END})
        batch.truncate_tensors(1, int(batch["length"].max()))
        rewards = torch.stack(rewards)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        # The log-probabilities are those of the weights that generated the answers.
        train(self.policy, batch.union({"advantages": advantages.flatten()}), "grpo", lr=5e-4, dp=self.options.dp)
        return rewards.mean().item()

    def save(self, ledger: Ledger, run: Run, step: int) -> None:
        """Write a checkpoint that exists as a whole or not at all."""
        unfinished = self.folder / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        self.policy.call("save", str(unfinished / "policy")).result()
        (unfinished / "run.json").write_text(json.dumps(run))
        ledger.prepare(step, unfinished)
        unfinished.rename(self.folder / f"step-{step:06}")
        ledger.commit(step)

    def run(self, staleness: int, start: int = 0, run: Run | None = None, *, saves: bool = False) -> Run:
        """Train from a checkpoint to the end, and return the record of each step."""
        options, run, folder = self.options, run or [], self.folder / f"step-{start:06}"
        config = LedgerConfig(group_size=ANSWERS, groups_per_version=PROBLEMS, max_staleness=staleness)
        self.policy.call("load", str(folder / "policy")).result()
        self.send_weights()
        if start:
            ledger = Ledger.restore(config, self.prompts, step=start, version=start, directory=folder)
        else:
            ledger = Ledger(config, self.prompts, checkpoints=saves)
        for step in range(start + 1, options.steps + 1):
            claim = self.claim(ledger, step)
            self.submit(ledger)  # They are generated while the policy trains.
            if saves and step == options.kill_at and start == 0:
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
            reward = self.train(claim)
            ages = [claim.version - group.oldest_version for group in claim.groups]
            run.append(
                {
                    "step": step,
                    "reward": reward,
                    "prompt_ids": [group.prompt_id for group in claim.groups],
                    "ages": ages,
                }
            )
            ledger.advance(step, trained=step)
            self.send_weights()
            if saves and (step % options.every == 0 or step == options.steps):
                self.save(ledger, run, step)
            if step % max(options.steps // 10, 1) == 0:
                print(
                    f"staleness {staleness}, step {step:4}  reward {np.mean([one['reward'] for one in run[-10:]]):.3f}"
                )
        if saves:
            ledger.show()
        return run


def drive(options: argparse.Namespace) -> None:
    """Run one driver: from the last checkpoint, or from imitation and the synchronous run."""
    folder = Path(options.driver)
    make = partial(
        RayWorkerGroup, sharding_annotations=NamedSharding.from_shape(dp=options.dp), timeouts=Timeouts(call_s=120)
    )
    init_ray(address=options.address)
    try:
        with (
            RayVirtualCluster([options.dp], use_gpus=False, enable_colocation=True, reserve_timeout_s=60) as cluster,
            make(cluster, RayWorkerBuilder(SavedPolicy, options.seed), name_prefix="policy") as policy,
            make(cluster, RayWorkerBuilder(Generation, options.seed), name_prefix="generation") as generation,
        ):
            trainer = Trainer(options, policy, generation)
            policy.call("connect").result()
            with trainer.link:
                saved = sorted(folder.glob("step-*"))
                if not saved:
                    print(f"{imitate(policy, random.Random(options.seed), dp=options.dp)} steps of imitation")
                    policy.call("save", str(folder / "step-000000" / "policy")).result()
                    (folder / "synchronous.json").write_text(json.dumps(trainer.run(0)))
                start = int(saved[-1].name.removeprefix("step-")) if saved else 0
                run = json.loads((saved[-1] / "run.json").read_text()) if start else []
                if start:
                    print(f"continue after step {start}")
                run = trainer.run(options.staleness, start, run, saves=True)
                (folder / "asynchronous.json").write_text(json.dumps(run))
            policy.shutdown(cleanup_method="disconnect")
    finally:
        ray.shutdown()


def check(run: Run, options: argparse.Namespace) -> None:
    """Print the account of all prompts, and fail unless each was trained once and none was too old."""
    times = Counter(prompt_id for record in run for prompt_id in record["prompt_ids"])
    missing = [prompt_id for prompt_id in range(options.steps * PROBLEMS) if prompt_id not in times]
    twice = [prompt_id for prompt_id, count in times.items() if count > 1]
    ages = Counter(age for one in run for age in one["ages"])
    print(f"{len(times):,} prompts were trained, {len(missing)} were skipped, {len(twice)} were trained twice")
    print(f"prompts by the age of their weights: {dict(sorted(ages.items()))}")
    if missing or twice or max(ages) > options.staleness:
        raise RuntimeError(f"skipped: {missing}; twice: {twice}; ages: {ages}, and {options.staleness} is the bound.")


def draw_fates(run: Run, path: str) -> None:
    """Draw each prompt at the step that trained it: one dot for each, colored by the age of its weights."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step that trained it", ylabel="prompt id", title="The fate of each prompt")
    for age in sorted({age for record in run for age in record["ages"]}):
        dots = [
            (record["step"], prompt_id)
            for record in run
            for prompt_id, trained_age in zip(record["prompt_ids"], record["ages"], strict=True)
            if trained_age == age
        ]
        axes.scatter(*zip(*dots, strict=True), s=4, label=f"weights {age} versions old")
    axes.legend()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="number of GRPO steps")
    parser.add_argument("--staleness", type=int, default=1, help="the most versions by which weights are old")
    parser.add_argument("--dp", type=int, default=2, choices=(1, 2, 4, 8), help="number of workers in each group")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill", action="store_true", help="kill the driver in the middle of a step, and resume")
    parser.add_argument("--plot", default="async-grpo-rewards.png", help="file for the reward curves")
    own = os.environ.get("RAY_ADDRESS") or "local"
    parser.add_argument("--fates", default="async-grpo-fates.png", help="file for the fates of the prompts")
    parser.add_argument("--address", default=own, help="address of a Ray cluster (default: RAY_ADDRESS, or a new one)")
    parser.add_argument("--driver", help=argparse.SUPPRESS)  # the folder of the run, in the process that drives it
    options = parser.parse_args(argv)
    if options.steps < 4:
        parser.error(f"argument --steps: must be at least 4, got {options.steps}")
    options.every = max(options.steps // 10, 2)  # steps between two checkpoints
    options.kill_at = options.steps // 2 + options.every // 2 if options.kill else None
    if options.driver:
        drive(options)
        return 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="async-grpo-") as folder:
        init_ray(address=options.address, num_cpus=2 * options.dp)
        given = sys.argv[1:] if argv is None else argv
        address = ray.get_runtime_context().gcs_address
        command = [sys.executable, __file__, *given, "--address", address, "--driver", folder]
        try:
            status = subprocess.run(command).returncode
            if options.kill:
                if status != -signal.SIGKILL:
                    raise RuntimeError(f"The driver ended with status {status} before it was killed.")
                print(f"the driver was killed in the middle of step {options.kill_at}")
                status = subprocess.run(command).returncode
        finally:
            ray.shutdown()
        if status:
            return status
        names = "synchronous", "asynchronous"
        runs = {name: json.loads(Path(folder, f"{name}.json").read_text()) for name in names}
    check(runs["asynchronous"], options)
    draw_fates(runs["asynchronous"], options.fates)
    rewards = {name: [one["reward"] for one in run] for name, run in runs.items()}
    draw(rewards, options.plot, "GRPO, synchronous and not")
    fifth, gains = max(options.steps // 5, 1), []
    for name, values in rewards.items():
        first, last = np.mean(values[:fifth]), np.mean(values[-fifth:])
        gains.append(last - first)
        print(f"{name}: reward {first:.3f} -> {last:.3f} (first and last fifth)")
    print(f"wrote the reward curves to {options.plot} after {time.monotonic() - began:.0f} s")
    return 0 if min(gains) >= GAIN or options.steps < STEPS else 1


if __name__ == "__main__":
    sys.exit(main())
