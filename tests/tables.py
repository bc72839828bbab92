"""Rows small enough for a test."""

from __future__ import annotations

import numpy as np

from hvdist.prepare import Table


def small_table(rows: int, seed: int = 0) -> Table:
    """Rows of 2 x 3 floats in 3 classes that a linear model can tell apart."""
    generator = np.random.default_rng(seed)
    y = generator.integers(0, 3, rows)
    centres = np.random.default_rng(99).normal(size=(3, 2, 3))
    x = (centres[y] + 0.3 * generator.normal(size=(rows, 2, 3))).astype(np.float32)
    return Table(x, y)
