# SPDX-License-Identifier: Apache-2.0
"""A checkpoint engine of verl. It needs verl 0.9.1 or later."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from ._members import make_memberships
from ._stream import WeightEngine

__all__ = ["FairleadCheckpointEngine"]

if TYPE_CHECKING:

    class CheckpointEngine:
        """The base class of verl's checkpoint engines."""

    CheckpointEngineRegistry: Any = None
else:
    try:
        from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
    except ModuleNotFoundError as _error:
        if _error.name != "verl":
            raise
        # The documentation describes this module where verl is not installed.
        CheckpointEngine, CheckpointEngineRegistry = object, None


class FairleadCheckpointEngine(WeightEngine, CheckpointEngine):
    """Bring the weights of verl's trainer to its rollout workers in buckets: by shared memory, between hosts by TCP.

    verl makes it if `actor_rollout_ref.rollout.checkpoint_engine` has the `backend` "fairlead" and the
    `custom_backend_module` `fairlead_transfer.adapters.verl`. All trainer ranks share the work: each stages its part of
    every bucket.

    Args:
        bucket_size: bytes of a bucket, of which a process holds at most two; a larger tensor is put together in the
            receivers. verl passes `update_weights_bucket_megabytes`.
        is_master: whether this is the first rank of the trainer. verl passes it.
        timeout: seconds that a process waits for another one; `engine_kwargs.fairlead.timeout`.
        dtype: the dtype in which floating-point tensors travel, such as "bfloat16"; None for their own.
            `engine_kwargs.fairlead.dtype`.

    Raises:
        ValueError: a size or timeout that is not positive, or a dtype that floating-point tensors do not have.

    >>> FairleadCheckpointEngine(bucket_size=1 << 20).wire_format
    'named_tensors'
    """

    wire_format: str = "named_tensors"

    def __init__(
        self, bucket_size: int, is_master: bool = False, timeout: float = 600.0, dtype: str | None = None
    ) -> None:
        super().__init__(bucket_size, timeout, dtype)
        self.is_master = is_master

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Give every process its place in the transfer.

        Args:
            actor_wg_world_size: the ranks of the trainer.
            rollout_world_size: the rollout workers.
            metadata: what `prepare` has returned in each of them, the trainer first.

        Returns:
            The arguments of `init_process_group` for each rank of the trainer, and for each rollout worker.

        Raises:
            ValueError: no rank on one side, or different bucket sizes.
        """
        made: list[Any] = list(make_memberships(metadata, actor_wg_world_size))
        return {"membership": made[:actor_wg_world_size]}, {"membership": made[actor_wg_world_size:]}

    def init_process_group(self, membership: Any) -> None:
        """Take the place in the transfer. This waits for no other process.

        Args:
            membership: the place that `build_topology` has given to this process.

        Raises:
            ValueError: `prepare` was not called before, or the bucket is too small.
        """
        self._join(membership)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, Any], None]:
        """Receive weights.

        Args:
            global_steps: the version, for errors.

        Returns:
            An iterator over names and tensors in host memory, as they arrive. They stay valid.

        Raises:
            TransferError: a process is lost, late, or has failed; names it.
            ValueError: this engine has no place in a transfer.
        """
        async with aclosing(self._receive(global_steps)) as buckets:
            async for tensors in buckets:
                while tensors:  # no tensor is kept here that the engine has dropped
                    yield tensors.pop(0)


if CheckpointEngineRegistry is not None:
    CheckpointEngineRegistry.register("fairlead")(FairleadCheckpointEngine)
