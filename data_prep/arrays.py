"""Arrays of your own as shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hvdist.errors import UserError
from hvdist.flags import run
from hvdist.prepare import Packing, Table, split, write_folders


def arrays(
    out: str,
    npz: str | None = None,
    x: str | None = None,
    y: str | None = None,
    x_test: str | None = None,
    y_test: str | None = None,
    test_fraction: float = 0.1,
    packing: Packing = Packing(),
) -> None:
    """Write arrays from .npz or .npy files as shard folders.

    Args:
        out: Folder to write, with train and test inside.
        npz: File with the arrays x (n, ...), numbers, and y (n,), integer classes from 0; x_test and y_test too if
            it has them.
        x: Or a .npy file of x,
        y: and one of y.
        x_test: A .npy file of test rows,
        y_test: and their classes.
        test_fraction: Share of the rows held out for testing, drawn by the seed, where no test rows are given.
        packing: How rows become files.
    """
    given = {"x": x, "y": y, "x_test": x_test, "y_test": y_test}
    if bool(npz) == bool(x and y) or bool(x_test) != bool(y_test):
        raise UserError("give --npz FILE, or --x and --y, with --x_test and --y_test together or not at all")
    loaded = _load(npz) if npz else {name: _load(path)["array"] for name, path in given.items() if path}
    if "x" not in loaded or "y" not in loaded:
        raise UserError(f"{npz} has the arrays {', '.join(loaded)}; x and y are needed")
    tables = {"train": Table(loaded["x"], loaded["y"])}
    if "x_test" in loaded and "y_test" in loaded:
        tables["test"] = Table(loaded["x_test"], loaded["y_test"])
    else:
        rows = len(loaded["y"])
        tables = split(tables["train"], round(rows * test_fraction), packing.seed)
    write_folders(out, tables, str(npz or x), packing)


def _load(path: str) -> dict[str, np.ndarray]:
    """The arrays of a .npz file by name, or that of a .npy file as "array"."""
    if not Path(path).is_file():
        raise UserError(f"{path} does not exist")
    try:  # pickles are refused: they run whatever they hold
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        return {"array": loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"{path} is not a .npy or .npz file of plain numbers: {error}") from error


if __name__ == "__main__":
    run(arrays)
