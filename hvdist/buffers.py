"""Byte buffers that are used again: fresh memory costs a page fault every 4 KiB, more than the copy into it."""

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


class BufferPool:
    """Hands out buffers; one is free again as soon as no tensor refers to its memory."""

    def __init__(self) -> None:
        self._buffers: dict[int, list[np.ndarray]] = defaultdict(list)

    def take(self, nbytes: int) -> Tensor:
        """(nbytes,) uint8, uninitialised, aligned for vector instructions."""
        kept = self._buffers[nbytes]
        for buffer in kept:
            if sys.getrefcount(buffer) == _IDLE_REFERENCES:
                return torch.from_numpy(buffer)
        buffer = _aligned(nbytes)
        if len(kept) < _KEPT_PER_SIZE:
            kept.append(buffer)
        return torch.from_numpy(buffer)


def _aligned(nbytes: int) -> np.ndarray:
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes]
