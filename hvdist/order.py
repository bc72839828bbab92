"""Who reads which row when: pure arithmetic, the same on every rank, so that step counts never differ between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Order = Literal["global", "local"]


@dataclass(frozen=True)
class Plan:
    """One reader's share of one epoch.

    Attributes:
        positions: (m,) int64, the rows this reader reads, in order.
        sizes: (steps,) int64, how many of them at each step; 0 where only others have rows left.
        totals: (steps,) int64, rows of each step over all readers, never 0.
    """

    positions: np.ndarray
    sizes: np.ndarray
    totals: np.ndarray


def global_plan(rows: int, readers: int, reader: int, batch: int, seed: int, epoch: int, start: int = 0) -> Plan:
    """One permutation of all rows, cut over the readers step by step.

    A step takes the next `batch * readers` rows of the permutation; the last step's fewer rows are cut evenly. So the
    rows of a step depend on the seed, the epoch and that product alone, not on the number of readers.

    Args:
        rows, readers, reader: n, K and this reader's number in [0, K).
        batch: rows of one reader in a full step.
        seed, epoch: choose the permutation.
        start: rows of the permutation that were read before, by all readers.
    """
    positions = np.random.default_rng([seed, epoch]).permutation(rows)[start:]
    width = batch * readers
    begins = np.arange(0, len(positions), width)
    totals = np.minimum(width, len(positions) - begins)
    sizes, extra = np.divmod(totals, readers)
    begins = begins + sizes * reader + np.minimum(reader, extra)
    sizes = sizes + (reader < extra)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    index = np.arange(sizes.sum()) + np.repeat(begins - starts[: len(begins)], sizes)
    return Plan(positions[index], sizes, totals)


def local_plan(rows: int, readers: int, reader: int, batch: int, seed: int, epoch: int, start: int = 0) -> Plan:
    """Every reader has its own contiguous rows and permutes only those; shares differ by at most one row.

    Args: as `global_plan`; `start` counts full steps of all readers.
    """
    bounds = rows * np.arange(readers + 1) // readers
    done = np.minimum(np.diff(bounds), -(-start // readers))
    first, last = bounds[reader : reader + 2]
    mine = first + np.random.default_rng([seed, epoch, reader]).permutation(int(last - first))
    left = np.diff(bounds) - done
    begins = np.arange(0, left.max(), batch)
    sizes = np.clip(left - begins[:, None], 0, batch)
    return Plan(mine[done[reader] :], sizes[:, reader], sizes.sum(axis=1))


PLANS = {"global": global_plan, "local": local_plan}
