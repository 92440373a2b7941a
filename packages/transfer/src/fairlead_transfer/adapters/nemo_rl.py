# SPDX-License-Identifier: Apache-2.0
"""A checkpoint engine of NeMo RL."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from ._members import make_memberships
from ._stream import WeightEngine

__all__ = ["FairleadCheckpointEngine"]

if TYPE_CHECKING:

    class CheckpointEngine:
        """The base class of NeMo RL's checkpoint engines."""

else:
    try:
        from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine
    except ModuleNotFoundError as _error:
        if _error.name != "nemo_rl":
            raise
        CheckpointEngine = object  # The documentation describes this module where NeMo RL is not installed.


class FairleadCheckpointEngine(WeightEngine, CheckpointEngine):
    """Bring the weights of NeMo RL's policy workers to its generation workers: by shared memory, between hosts by TCP.

    NeMo RL makes it if `policy.generation.refit_transport` is
    `fairlead_transfer.adapters.nemo_rl:FairleadCheckpointEngine`. All policy workers share the work: each stages its
    part of every bucket. There may be fewer policy workers than generation workers.

    Args:
        bucket_size: bytes of a bucket, of which a process holds at most two; a larger tensor is put together in the
            receivers. NeMo RL computes it.
        timeout: seconds that a process waits for another one.
        cleanup_after_load: whether generation workers empty the cache of their GPU after each refit.
        release_after_refit: accepted because NeMo RL passes it: `finalize` always gives everything back.
        dtype: the dtype in which floating-point tensors travel, such as "bfloat16"; None for their own.

    Raises:
        ValueError: a size or timeout that is not positive, or a dtype that floating-point tensors do not have.

    >>> FairleadCheckpointEngine(bucket_size=1 << 20).cleanup_after_load
    True
    """

    cleanup_after_load: bool = True
    # Every generation worker gets whole tensors.
    shard_expert_weights: bool = False

    def __init__(
        self,
        bucket_size: int,
        timeout: float = 600.0,
        cleanup_after_load: bool = True,
        release_after_refit: bool = False,
        dtype: str | None = None,
    ) -> None:
        super().__init__(bucket_size, timeout, dtype)
        self.cleanup_after_load = cleanup_after_load

    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[Mapping[str, Any]],
    ) -> None:
        """Take the place of a policy worker in the transfer. This waits for no other process.

        Args:
            worker_rank: its rank.
            train_world_size: the policy workers.
            rollout_world_size: the generation workers.
            metadata: what `prepare` has returned in each of them, the policy workers first.

        Raises:
            ValueError: `prepare` was not called before, or the bucket is too small.
        """
        self._join(make_memberships(metadata, train_world_size)[worker_rank])

    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[Mapping[str, Any]],
    ) -> None:
        """Take the place of a generation worker, as `init_policy_process_group` does of a policy worker.

        Args:
            rollout_rank: its rank.
            train_world_size, rollout_world_size, metadata: as there.

        Raises:
            ValueError: `prepare` was not called before, or the bucket is too small.
        """
        self._join(make_memberships(metadata, train_world_size)[train_world_size + rollout_rank])

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, Any]], None]:
        """Receive weights.

        Returns:
            An iterator over the names and tensors of each bucket, in host memory. They stay valid.

        Raises:
            TransferError: a process is lost, late, or has failed; names it.
            ValueError: this engine has no place in a transfer.
        """
        async with aclosing(self._receive(None)) as buckets:
            async for tensors in buckets:
                yield tensors
                del tensors  # no tensor is kept here that the engine has dropped
