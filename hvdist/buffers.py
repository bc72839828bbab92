"""Memory for vectors that travel: in huge pages where they are long, and used again.

Between two ranks of a node MPI copies straight from one process's memory to the other's, and pays for every page; in
pages of 2 MiB instead of 4 KiB a transfer takes half the time. Fresh memory costs page faults on top.
"""

from __future__ import annotations

import sys
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

_KEPT_PER_SIZE = 64
_ALIGNMENT = 64
# An idle buffer is known to the pool's list, to the loop below and to getrefcount itself.
_IDLE_REFERENCES = 3


def memory(nbytes: int) -> np.ndarray:
    """(nbytes,) uint8, uninitialised, aligned for vector instructions; numpy asks for huge pages from 4 MiB on."""
    block = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -block.ctypes.data % _ALIGNMENT
    return block[start : start + nbytes]


def zeros(length: int) -> Tensor:
    """(length,) float32 zeros in such memory."""
    return torch.from_numpy(memory(4 * length)).view(torch.float32).zero_()


class BufferPool:
    """Hands out buffers; one is free again as soon as no tensor refers to its memory."""

    def __init__(self) -> None:
        self._buffers: dict[int, list[np.ndarray]] = defaultdict(list)

    def take(self, nbytes: int) -> Tensor:
        """(nbytes,) uint8, uninitialised."""
        kept = self._buffers[nbytes]
        for buffer in kept:
            if sys.getrefcount(buffer) == _IDLE_REFERENCES:
                return torch.from_numpy(buffer)
        buffer = memory(nbytes)
        if len(kept) < _KEPT_PER_SIZE:
            kept.append(buffer)
        return torch.from_numpy(buffer)
