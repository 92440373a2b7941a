# SPDX-License-Identifier: Apache-2.0
"""A worker class in a module that imports torch, which takes seconds in a new process."""

import time

import torch


class TorchWorker:
    """A worker whose constructor takes a few milliseconds."""

    def __init__(self) -> None:
        time.sleep(0.005)
        self.weights = torch.zeros(8)

    def nothing(self) -> None:
        return None
