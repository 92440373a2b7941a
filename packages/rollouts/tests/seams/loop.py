# SPDX-License-Identifier: Apache-2.0
"""A job in the loop of slime or miles: their worker, buffer and data source, with generation replaced by a function.

`python loop.py FRAMEWORK CHECKOUTS FOLDER LAST` runs rollouts until LAST, in the order of calls of the framework's
`train_async.py`. It continues after the newest model in FOLDER/save, and writes every call of the adapter to
FOLDER/calls.jsonl. A model is the list of the prompts that it was trained on. `--crash` ends the process with SIGKILL
after the model of the last rollout has been saved and before the data source is.
"""

import asyncio
import copy
import functools
import json
import logging
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from adapters import Dataset, first, make_args
from conftest import import_seam

BATCH, PROMPTS, EVERY, STALENESS, DEADLINE_S = 4, 30, 5, 2, 1.0
OLD_ROLLOUTS = 5  # of the run that began without a ledger
versions = [1]  # of the weights that the engines serve; a new process counts from the beginning
attempts = {}


class GenerateState:
    """In place of the state of requests to SGLang."""

    def __init__(self, args):
        self.args, self.sampling_params, self.aborted = args, {}, False


async def generate(group):
    """Generate a group: some are slow, one in seventeen prompts is a straggler, one in five has more trajectories."""
    prompt_id = group[0].group_index
    attempts[prompt_id] = attempts.get(prompt_id, 0) + 1
    began = versions[0]
    straggles = prompt_id % 17 == 3 and attempts[prompt_id] == 1
    await asyncio.sleep(2 * DEADLINE_S if straggles else 0.02 + 0.1 * (prompt_id % 7 == 0))
    for sample in group:
        sample.response, sample.reward, sample.weight_versions = "ok", 1.0, [str(began)]
        aborted = prompt_id % 11 == 5 and attempts[prompt_id] == 1
        sample.status = sample.Status.ABORTED if aborted else sample.Status.COMPLETED
    if prompt_id % 5 == 0:
        return [[sample, copy.deepcopy(sample)] for sample in group]
    return group


class Slime:
    """slime's fully asynchronous rollouts."""

    adapter = "slime"

    def __init__(self, checkouts):
        stub = ModuleType("slime.rollout.sglang_rollout")
        stub.GenerateState = GenerateState
        stub.generate_and_rm_group = lambda args, group, sampling_params, evaluation=False: generate(group)
        stub.generate_rollout = lambda args, rollout_id, source, evaluation: {"evaluation": evaluation}
        sys.modules[stub.__name__] = stub
        self.source_module = import_seam(checkouts / "slime", "slime.rollout.data_source")
        self.loop_module = import_seam(checkouts / "slime", "slime.rollout.fully_async_rollout")
        sys.modules["slime.utils.http_utils"].get_rollout_num_engines = lambda args: 1

    def start(self, args, source):
        from fairlead_rollouts.slime import generate_rollout

        self.generate_rollout = functools.partial(generate_rollout, args, data_source=source)

    def generate(self, rollout_id):
        return self.generate_rollout(rollout_id)

    def evaluate(self, rollout_id):
        assert self.generate_rollout(rollout_id, evaluation=True) == {"evaluation": True}


class Miles:
    """miles' fully asynchronous rollouts."""

    adapter = "miles"

    def __init__(self, checkouts):
        common = ModuleType("miles.rollout.inference_rollout.inference_rollout_common")
        common.GenerateState = GenerateState

        async def generate_group(state, group, sampling_params, evaluation, sample_done_callback):
            result = await generate(group)
            for _ in group if sample_done_callback else ():
                sample_done_callback()
            return result

        common.generate_and_rm_group = generate_group
        evaluation = ModuleType("miles.rollout.inference_rollout.inference_rollout_eval")

        async def run_eval_datasets(state, cache):
            await asyncio.sleep(0.05)
            return {"math": {"rewards": [1.0]}}

        evaluation.run_eval_datasets = run_eval_datasets
        sys.modules |= {module.__name__: module for module in (common, evaluation)}
        self.source_module = import_seam(checkouts / "miles", "miles.rollout.data_source")
        import_seam(checkouts / "miles", "miles.rollout.fully_async_data_buffer")
        self.loop_module = import_seam(checkouts / "miles", "miles.rollout.fully_async_rollout")
        self.calls = import_seam(checkouts / "miles", "miles.rollout.inference_rollout.compatibility")
        self.base = sys.modules["miles.rollout.base_types"]

    def start(self, args, source):
        load_function = self.loop_module.load_function

        def make_buffer(given):
            buffer = load_function(args.custom_async_data_buffer_path)(given)
            record_buffer(buffer, self.recorder)
            return buffer

        own = {args.custom_async_data_buffer_path: make_buffer}
        self.loop_module.load_function = lambda path: own.get(path) or load_function(path)
        self.function = self.loop_module.FullyAsyncRolloutFn(
            self.base.RolloutFnConstructorInput(args=args, data_source=source)
        )

    def generate(self, rollout_id):
        request = self.base.RolloutFnTrainInput(rollout_id=rollout_id, weight_version=versions[0])
        return self.calls.call_rollout_function(self.function, request).samples

    def evaluate(self, rollout_id):
        request = self.base.RolloutFnEvalInput(rollout_id=rollout_id)
        assert self.calls.call_rollout_function(self.function, request).data == {"math": {"rewards": [1.0]}}


# Arguments of both frameworks that the loops read and that stay as they are by default.
UNSET = (
    "chat_template_path dump_details rollout_max_prompt_len input_key multimodal_keys label_key "
    "metadata_key tool_key apply_chat_template_kwargs async_max_concurrent_samples rollout_submission_granularity "
    "rollout_sample_filter_path"
)


def loop_args(folder):
    """Return the arguments as the driver has sent them: it did not know the first rollout then."""
    return make_args(
        folder / "save",
        **dict.fromkeys(UNSET.split()),
        rollout_batch_size=BATCH,
        rollout_global_dataset=True,
        rollout_seed=0,
        prompt_data="prompts",
        hf_checkpoint="",
        apply_chat_template=False,
        sglang_server_concurrency=BATCH * 2,
        max_weight_staleness=STALENESS,
        custom_async_data_buffer_path="fairlead_rollouts.miles.LedgerDataBuffer",
        ledger_max_staleness=STALENESS,
        ledger_deadline_s=DEADLINE_S,
        ledger_missing="epoch",
    )


class Recorder:
    """Write the calls of an adapter with what they returned, in the order in which they happened."""

    def __init__(self, path):
        self.file = path.open("a")

    def write(self, call, **values):
        self.file.write(json.dumps({"call": call, **values}) + "\n")
        self.file.flush()

    def wrap(self, owner, name, lock, describe, describe_result=lambda result: result):
        method = getattr(owner, name)

        def call(*args):
            with lock:
                before = describe(*args)
                result = method(*args)
                self.write(name.strip("_"), **before, result=describe_result(result))
                return result

        setattr(owner, name, call)


def token(group):
    """Return the lease of a group, without the part that is random in each process."""
    return first(group).metadata["ledger_token"] & 0xFFFFFFFF


def record_source(source, recorder):
    """Record the calls that both frameworks make of a data source, and those of slime's rollout function."""

    def wrap(name, *describe):
        recorder.wrap(source, name, source.lock, *describe)

    wrap(
        "get_samples",
        lambda count: {"count": count, "now": time.monotonic()},
        lambda groups: [[group[0].group_index, token(group)] for group in groups],
    )
    wrap("add_samples", lambda groups: {"leases": list(map(token, groups))})
    wrap("save", lambda rollout_id: {"rollout": rollout_id})
    if hasattr(source, "take"):
        wrap("begin", lambda rollout_id: {"rollout": rollout_id})
        wrap(
            "take",
            lambda rollout_id, groups: {"rollout": rollout_id, "leases": list(map(token, groups))},
            lambda taken: taken if isinstance(taken, int) else [first(group).group_index for group in taken],
        )


def record_buffer(buffer, recorder):
    """Record what is put into a data buffer of miles and taken from it."""

    def describe(value):
        samples = [sample for item in value.group for sample in (item if isinstance(item, list) else [item])]
        aborted = any(sample.status == sample.Status.ABORTED for sample in samples)
        versions = [sample.oldest_weight_version for sample in samples]
        return {"lease": token(value.prompt_group), "aborted": aborted, "versions": versions}

    recorder.wrap(buffer, "_record", buffer._lock, describe)
    taken = (lambda version: {"version": version}), (lambda value: value and first(value.group).group_index)
    recorder.wrap(buffer, "_take", buffer._lock, *taken)


def begin_without_a_ledger(framework, args):
    """Make the checkpoints of a run with the framework's own data source."""
    source = framework.source_module.RolloutDataSource(args)
    for _ in range(OLD_ROLLOUTS):
        source.get_samples(BATCH)
    Path(args.save, "rollout").mkdir(parents=True)
    source.save(OLD_ROLLOUTS - 1)
    save_model(args, OLD_ROLLOUTS - 1, [])


def save_model(args, rollout_id, trained):
    path = Path(args.save, f"model-{rollout_id:04}.json")
    path.with_suffix(".part").write_text(json.dumps(trained))
    path.with_suffix(".part").rename(path)


def run(framework, folder, last, *, crash):
    """Train until a rollout, and report the fate of every prompt."""
    args = loop_args(folder)
    module = framework.source_module
    sample = sys.modules[f"{framework.adapter}.utils.types"].Sample
    module.Dataset = lambda *given, **options: Dataset(PROMPTS, sample)
    module.load_tokenizer = module.load_processor = lambda *given, **options: None
    if not Path(args.save).exists():
        begin_without_a_ledger(framework, args)
    adapter = __import__(f"fairlead_rollouts.{framework.adapter}", fromlist=["LedgerDataSource"])
    source = adapter.LedgerDataSource(copy.deepcopy(args))
    framework.start(source._args, source)
    recorder = Recorder(folder / "calls.jsonl")
    # Only now the driver knows the first rollout.
    models = sorted(Path(args.save).glob("model-*.json"))
    trained, start = json.loads(models[-1].read_text()), int(models[-1].stem.split("-")[1]) + 1
    source.load(start - 1)
    recorder.write("load", rollout=start - 1, result=source.ledger.statistics().applied)
    record_source(source, recorder)
    framework.recorder = recorder
    # slime's manager handles one request after the other, miles' one handles them together.
    requests = ThreadPoolExecutor(1 if framework.adapter == "slime" else 4)

    following = requests.submit(framework.generate, start)
    for rollout_id in range(start, last + 1):
        batch = following.result()
        following = requests.submit(framework.generate, rollout_id + 1) if rollout_id < last else None
        assert len(batch) == BATCH
        time.sleep(0.05)  # the training
        trained += [first(group).group_index for group in batch]
        ages = [versions[0] - int(first(group).weight_versions[0]) for group in batch]
        recorder.write("train", rollout=rollout_id, ages=ages)
        if rollout_id % EVERY == EVERY - 1 or rollout_id == last:
            save_model(args, rollout_id, trained)
            if crash and rollout_id == last:
                os.kill(os.getpid(), signal.SIGKILL)
            requests.submit(source.save, rollout_id).result()
        if following is not None:
            following.result()
        versions[0] += 1
        if rollout_id % 8 == 0:
            requests.submit(framework.evaluate, rollout_id).result()
            recorder.write("evaluation", rollout=rollout_id)
    ledger = source.ledger
    numbers = ledger.statistics()
    report = {"trained": trained, "staleness": numbers.staleness, "fenced": numbers.fenced}
    report["states"] = [ledger.state(prompt_id) for prompt_id in range(len(ledger._book.fates))]
    (folder / "report.json").write_text(json.dumps(report))


def main():
    name, checkouts, folder, last, *crash = sys.argv[1:]
    logging.basicConfig(level=logging.WARNING)
    framework = (Slime if name == "slime" else Miles)(Path(checkouts).resolve())
    run(framework, Path(folder), int(last), crash=crash == ["--crash"])
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
