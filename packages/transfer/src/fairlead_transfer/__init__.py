# SPDX-License-Identifier: Apache-2.0
"""Named tensors from one group of workers to another with a different layout.

>>> from fairlead_sharding import NamedSharding
>>> from fairlead_transfer import Layout, reshard
>>> trained = Layout.from_sharding((1024, 512), NamedSharding.from_shape(dp=4), {0: "dp"}, itemsize=2)
>>> served = Layout.from_sharding((1024, 512), NamedSharding.from_shape(replica=2, tp=2), {1: "tp"}, itemsize=2)
>>> plan = reshard(trained, served, source_nodes=["a", "a", "b", "b"], target_nodes=["a", "a", "b", "b"])
>>> plan.bytes_moved, plan.bytes_between_nodes
(2097152, 1048576)
"""

from ._layout import Layout, LocalTensor
from ._link import Link
from ._pieces import PieceTable
from ._plan import TensorSet, TransferPlan, reshard
from ._report import TransferExplanation, TransferReport
from .exceptions import LayoutMismatchError, Mismatch, RankFailure, StaleWeightsError, TransferError

__version__ = "0.1.0"

__all__ = [
    "Layout",
    "LayoutMismatchError",
    "Link",
    "LocalTensor",
    "Mismatch",
    "PieceTable",
    "RankFailure",
    "StaleWeightsError",
    "TensorSet",
    "TransferError",
    "TransferExplanation",
    "TransferPlan",
    "TransferReport",
    "reshard",
]
