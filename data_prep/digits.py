"""The handwritten digits that scikit-learn carries, as shards: real data without a download."""

from __future__ import annotations

import numpy as np

from hvdist.errors import UserError
from hvdist.flags import run
from hvdist.prepare import Packing, Table, split, write_folders

_BRIGHTEST = 16


def digits(
    out: str,
    test_rows: int = 297,
    packing: Packing = Packing(),
) -> None:
    """Write scikit-learn's 1,797 digits, 8 x 8 grey values in [0, 1] as float32, as shard folders.

    Args:
        out: Folder to write, with train and test inside.
        test_rows: Rows held out for testing, drawn by the seed.
        packing: How rows become files.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError("the digits come with scikit-learn: pip install scikit-learn") from error
    bundle = load_digits()
    x = (bundle.images[:, None] / _BRIGHTEST).astype(np.float32)
    tables = split(Table(x, bundle.target), test_rows, packing.seed)
    write_folders(out, tables, "scikit-learn's digits", packing)


if __name__ == "__main__":
    run(digits)
