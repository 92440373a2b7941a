# SPDX-License-Identifier: Apache-2.0
"""The samples of all ranks of a torch process group.

If a rank failed before a collective, the others would wait for it. So after each step that can fail on a single rank
the ranks exchange their failures, and all of them raise.
"""

import math
import pickle
from collections.abc import Callable
from typing import Any

from ._leaves import interop, operations
from ._samples import Samples


def gather(batch: Samples[Any], group: Any) -> list[Samples[Any]]:
    """Return the samples of each rank, on every rank; for errors see `BatchedDataDict.all_gather`."""
    torch = interop.require_torch()
    flat: dict[str, Any] = {}

    def describe() -> tuple[Any, ...]:
        operations.count_samples(batch.data)  # raises if leaves disagree
        signatures, others = {}, {}
        for key, leaf in batch.data.items():
            # All ranks have to agree on these, except for the sizes.
            device = leaf.device.type if interop.is_tensor(leaf) else ""
            dtype, shape = str(getattr(leaf, "dtype", "")), tuple(getattr(leaf, "shape", ()))
            signatures[key] = type(leaf).__name__, dtype, device, shape
            if device:
                # No backend supports every dtype, so bytes are gathered.
                dense = leaf.detach().resolve_conj().resolve_neg().contiguous()
                # contiguous() and reshape() keep the stride of a dim of size 1, and view() refuses one that is not 1.
                flat[key] = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
            else:
                others[key] = pickle.dumps(leaf, protocol=5)
        return signatures, batch.padding, batch.meta, others

    signatures, paddings, metas, pickles = zip(*_exchange(describe, group), strict=True)
    _check_alike(signatures)
    ranks: list[Samples[Any]] = [Samples() for _ in signatures]
    memory: dict[str, tuple[Any, list[Any]]] = {}

    def allocate() -> None:
        for key in signatures[0]:
            leaf = batch[key]
            if key in flat:
                shapes = [other[key][-1] for other in signatures]
                sizes = [math.prod(shape) * leaf.element_size() for shape in shapes]
                # Some backends require tensors of one size.
                missing = max(sizes) - flat[key].numel()
                # `pad` copies, also if nothing is missing.
                sent = torch.nn.functional.pad(flat[key], (0, missing)) if missing else flat[key]
                memory[key] = sent, [flat[key].new_empty(max(sizes)) for _ in shapes]
                for rank, data, size, shape in zip(ranks, memory[key][1], sizes, shapes, strict=True):
                    rank[key] = data[:size].view(leaf.dtype).reshape(shape)
            else:
                for rank, others in zip(ranks, pickles, strict=True):
                    rank[key] = pickle.loads(others[key])

    _exchange(allocate, group)
    # Every rank gathers in the order of rank 0, so that all of them gather the same tensor at the same time.
    for key in signatures[0]:
        if key in memory:
            sent, received = memory[key]
            torch.distributed.all_gather(received, sent, group=group)
    for rank, rank_padding, meta in zip(ranks, paddings, metas, strict=True):
        rank.padding, rank.meta = rank_padding, meta
    return ranks


def _exchange(step: Callable[[], Any], group: Any) -> list[Any]:
    """Run ``step`` and return its value on each rank."""
    value = failure = None
    try:
        value = step()
    except Exception as error:  # noqa: BLE001 - the other ranks have to learn of any error
        failure = error
    mine = value, None if failure is None else f"{type(failure).__name__}: {failure}"
    dist = interop.require_torch().distributed
    results: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(results, mine, group=group)
    failed = [f"rank {rank} ({text})" for rank, (_, text) in enumerate(results) if text is not None]
    if failed:
        raise ValueError(f"all_gather failed before any tensor was sent, on {', '.join(failed)}.") from failure
    return [value for value, _ in results]


def _check_alike(signatures: tuple[dict[str, tuple[Any, ...]], ...]) -> None:
    if any(set(other) != set(signatures[0]) for other in signatures):
        raise ValueError(f"Ranks have different keys: {[sorted(other) for other in signatures]}.")
    for key in signatures[0]:
        if len({(*other[key][:-1], len(other[key][-1])) for other in signatures}) > 1:
            raise ValueError(f"Ranks have different leaves {key!r}: {[other[key] for other in signatures]}.")
