"""Writing shard folders: cut rows into files, permute them, appear on disk whole or not at all."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from hvdist.errors import UserError
from hvdist.hdf5 import sync, write_rows
from hvdist.manifest import NAME, Array, Manifest, ShardFile

Shuffle = Literal["global", "local", "none"]


@dataclass(frozen=True)
class Table:
    """Rows in memory: `x` (n, ...) and their classes `y` (n,), integers from 0."""

    x: np.ndarray
    y: np.ndarray

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or not len(self.y):
            raise UserError(f"x has {len(self.x)} rows and y has {len(self.y)}: they need the same number, at least 1")
        if self.y.ndim != 1 or not np.issubdtype(self.y.dtype, np.integer) or self.y.min() < 0:
            raise UserError(f"y holds one class a row, integers from 0; got {self.y.dtype} of shape {self.y.shape}")
        if self.x.dtype.kind not in "fiub":
            raise UserError(f"x holds numbers; got {self.x.dtype}")


def split(table: Table, test_rows: int, seed: int) -> dict[str, Table]:
    """Hold out rows for testing, drawn by the seed; both parts keep the order the rows had.

    Raises:
        UserError: nothing would be left on one side.
    """
    rows = len(table.y)
    if not 0 < test_rows < rows:
        raise UserError(f"{test_rows} test rows of {rows} leave none on one side")
    order = np.random.default_rng(seed).permutation(rows)
    parts = {"train": np.sort(order[test_rows:]), "test": np.sort(order[:test_rows])}
    return {name: Table(table.x[chosen], table.y[chosen]) for name, chosen in parts.items()}


@dataclass(frozen=True)
class Packing:
    """How rows become files: the flags that every script of data_prep/ has."""

    shards: int = 8
    """Files of each folder; their rows differ by at most one."""
    shuffle: Shuffle = "global"
    """global: a uniform permutation of all rows; local: one inside each file; none."""
    seed: int = 0
    """Of the permutations, and of a split into training and test rows where there is one."""
    compression: Literal["gzip", "lzf"] | None = None
    """Of the files; without, rows can be memory-mapped."""
    force: bool = False
    """Replace what is there, once the new is complete."""

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise UserError(f"shards is at least 1, got {self.shards}")


def write_folders(out: str | Path, tables: Mapping[str, Table], source: str, packing: Packing = Packing()) -> None:
    """Write `out/train`, `out/test`, ...: one shard folder for each table, all appearing at once.

    Args:
        out: must not exist, unless forced.
        tables: folder name -> its rows.
        source: where they come from, for the manifest.
        packing: how they become files.
    Raises:
        UserError: `out` exists.
    """
    out = Path(out)
    if out.exists() and not packing.force:
        raise UserError(f"{out} exists; give --force to replace it, or another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        whole = Path(scratch) / out.name
        for name, table in tables.items():
            _write_folder(whole / name, table, source, packing)
        sync(whole)
        if out.exists():
            out.rename(Path(scratch) / "replaced")
        whole.rename(out)
    sync(out.parent)
    counts = ", ".join(f"{len(table.y):,} {name} rows" for name, table in tables.items())
    print(f"{out}: {counts}, in {packing.shards} shards each")


def _write_folder(folder: Path, table: Table, source: str, packing: Packing) -> None:
    folder.mkdir(parents=True)
    files = []
    pieces = cut(len(table.y), packing.shards, packing.shuffle, packing.seed)
    for place, rows in enumerate(tqdm(pieces, f"{folder.name} shards", leave=False, disable=None)):
        path = folder / f"shard-{place:05d}-of-{packing.shards:05d}.h5"
        write_rows(path, {"x": table.x[rows], "y": table.y[rows].astype(np.int64), "row": rows}, packing.compression)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        files.append(ShardFile(path.name, len(rows), path.stat().st_size, digest))
    labels, counts = np.unique(table.y, return_counts=True)
    manifest = Manifest(
        rows=len(table.y),
        classes=dict(zip(labels.tolist(), counts.tolist(), strict=True)),
        arrays={
            "x": Array(table.x.dtype.name, table.x.shape[1:]),
            "y": Array("int64", ()),
            "row": Array("int64", ()),
        },
        files=tuple(files),
        source=source,
        shuffle=packing.shuffle,
        seed=packing.seed,
    )
    _write_last(folder / NAME, manifest.dumps())


def cut(rows: int, shards: int, shuffle: Shuffle, seed: int) -> list[np.ndarray]:
    """The rows of each shard: every row exactly once, sizes differ by at most one.

    Returns:
        for each shard, (m,) int64 row numbers.
    """
    generator = np.random.default_rng(seed)
    order = generator.permutation(rows) if shuffle == "global" else np.arange(rows)
    pieces = np.array_split(order, shards)
    return [generator.permutation(piece) for piece in pieces] if shuffle == "local" else pieces


def _write_last(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)
