"""Arrays of your own as shards."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from hvdist.errors import UserError
from hvdist.flags import run
from hvdist.prepare import Shuffle, Table, write_folders


def arrays(
    out: str,
    npz: str | None = None,
    x: str | None = None,
    y: str | None = None,
    x_test: str | None = None,
    y_test: str | None = None,
    test_fraction: float = 0.1,
    shards: int = 8,
    shuffle: Shuffle = "global",
    seed: int = 0,
    compression: Literal["gzip", "lzf"] | None = None,
    force: bool = False,
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
        shards: Files of each folder.
        shuffle: global, a permutation of all rows; local, inside each file; none.
        seed: Of the split and the permutation.
        compression: Of the files; none keeps them fit for memory maps.
        force: Replace OUT if it exists.
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
        tables = _split(tables["train"], test_fraction, seed)
    write_folders(
        out, tables, source=str(npz or x),
        shards=shards, shuffle=shuffle, seed=seed, compression=compression, force=force,
    )  # fmt: skip


def _load(path: str) -> dict[str, np.ndarray]:
    """The arrays of a .npz file by name, or that of a .npy file as "array"."""
    if not Path(path).is_file():
        raise UserError(f"{path} does not exist")
    try:  # pickles are refused: they run whatever they hold
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        return {"array": loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"{path} is not a .npy or .npz file of plain numbers: {error}") from error


def _split(table: Table, test_fraction: float, seed: int) -> dict[str, Table]:
    rows = len(table.y)
    held = round(rows * test_fraction)
    if not 0 < held < rows:
        raise UserError(f"test_fraction {test_fraction} of {rows} rows leaves no row on one side")
    order = np.random.default_rng(seed).permutation(rows)
    parts = {"train": np.sort(order[held:]), "test": np.sort(order[:held])}
    return {name: Table(table.x[chosen], table.y[chosen]) for name, chosen in parts.items()}


if __name__ == "__main__":
    run(arrays)
