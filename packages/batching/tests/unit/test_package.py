# SPDX-License-Identifier: Apache-2.0
"""The package depends on numpy and nothing else."""

import sys
from pathlib import Path

import fairlead_batching

USE = """
    import pickle, sys
    import numpy as np
    from fairlead_batching import BatchedDataDict, get_packer
    batch = BatchedDataDict(x=np.ones((4, 8)), n=np.array([8, 1, 2, 3]), who=list("abcd"))
    args = dict(max_tokens_per_microbatch=8, input_key="x", input_lengths_key="n")
    shards, order = batch.shard_by_batch_size(2, dynamic_batching_args={**args, "sequence_length_round": 1})
    packing = {**args, "algorithm": "balanced", "sequence_length_pad_multiple": 1}
    batch.shard_by_batch_size(2, sequence_packing_args=packing)
    received = pickle.loads(pickle.dumps(shards))
    assert order.restore(received)["who"] == list("abcd"), received
    batch.pad_to_multiple(3).drop_padding().to("cpu")
    print(sorted({name.partition(".")[0] for name in sys.modules} & {"ray", "torch"}))
"""


def test_works_without_ray_and_torch(run_python):
    """Everything except torch tensors works if neither can be imported."""
    assert run_python(USE, block=["ray", "torch", "typing_extensions"]).strip() == "[]"


def test_nothing_heavy_is_imported(run_python):
    """Sharding, packing and pickling arrays and lists import neither Ray nor torch, even if they are installed."""
    assert run_python(USE).strip() == "[]"


def test_imports(read_imports):
    """Imports are relative, or of the standard library, numpy, or typing_extensions."""
    allowed = {*sys.stdlib_module_names, "numpy", "typing_extensions"}
    modules = sorted(Path(fairlead_batching.__file__).parent.rglob("*.py"))
    assert {module.name: extra for module in modules if (extra := read_imports(module) - allowed)} == {}
