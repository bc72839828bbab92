"""The handwritten digits that scikit-learn carries, as shards: real data without a download."""

from __future__ import annotations

from typing import Literal

import numpy as np

from hvdist.errors import UserError
from hvdist.flags import run
from hvdist.prepare import Shuffle, Table, write_folders

_BRIGHTEST = 16


def digits(
    out: str,
    test_rows: int = 297,
    shards: int = 4,
    shuffle: Shuffle = "global",
    seed: int = 0,
    compression: Literal["gzip", "lzf"] | None = None,
    force: bool = False,
) -> None:
    """Write scikit-learn's 1,797 digits, 8 x 8 grey values in [0, 1] as float32, as shard folders.

    Args:
        out: Folder to write, with train and test inside.
        test_rows: Rows held out for testing, drawn by the seed.
        shards: Files of each folder.
        shuffle: global, a permutation of all rows; local, inside each file; none.
        seed: Of the split and the permutation.
        compression: Of the files; none keeps them fit for memory maps.
        force: Replace OUT if it exists.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError("the digits come with scikit-learn: pip install scikit-learn") from error
    bundle = load_digits()
    x = (bundle.images[:, None] / _BRIGHTEST).astype(np.float32)
    if not 0 < test_rows < len(x):
        raise UserError(f"test_rows must be in 1..{len(x) - 1}, got {test_rows}")
    order = np.random.default_rng(seed).permutation(len(x))
    parts = {"train": np.sort(order[test_rows:]), "test": np.sort(order[:test_rows])}
    tables = {name: Table(x[rows], bundle.target[rows]) for name, rows in parts.items()}
    write_folders(
        out, tables, source="scikit-learn's digits",
        shards=shards, shuffle=shuffle, seed=seed, compression=compression, force=force,
    )  # fmt: skip


if __name__ == "__main__":
    run(digits)
