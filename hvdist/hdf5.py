"""One shard file: write it whole, open its arrays for reading rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import h5py
import numpy as np

from hvdist.errors import UserError
from hvdist.manifest import Array, ShardFile


class Rows(Protocol):
    """An array on disk that gives rows by index."""

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        """Rows in the order of `index`, duplicates allowed."""


class ChunkedRows:
    """Rows of a chunked or compressed dataset, which HDF5 must read itself: in ascending order, each once."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        once, back = np.unique(index, return_inverse=True)
        with h5py.File(self._path, "r", locking=False) as file:
            rows: np.ndarray = file[self._name][once]
        return rows[back]


def open_rows(folder: Path, file: ShardFile, arrays: dict[str, Array]) -> dict[str, Rows]:
    """A shard's arrays: memory maps where they are contiguous. Reads no row, keeps no handle open.

    Raises:
        UserError: the file is not there, truncated, or not what the manifest says.
    """
    path = folder / file.name
    if not path.is_file():
        raise UserError(f"{path} is missing; the manifest lists it: copy it again or prepare the folder again")
    if path.stat().st_size != file.bytes:
        raise UserError(
            f"{path} is {path.stat().st_size} bytes, the manifest says {file.bytes}: truncated or replaced; "
            "copy it again or prepare the folder again"
        )
    try:
        with h5py.File(path, "r", locking=False) as handle:
            return {name: _rows(path, handle, name, file.rows, array) for name, array in arrays.items()}
    except OSError as error:
        raise UserError(f"{path} is not a readable HDF5 file ({error}); prepare the folder again") from error


def _rows(path: Path, handle: h5py.File, name: str, count: int, array: Array) -> Rows:
    link = handle.get(name, getlink=True)
    if link is None or not isinstance(link, h5py.HardLink):
        kind = "is missing" if link is None else f"is a link ({type(link).__name__}) that may lead anywhere"
        raise UserError(f"{path}: array {name!r} {kind}; a shard holds its own rows: prepare the folder again")
    dataset = handle[name]
    if not isinstance(dataset, h5py.Dataset) or dataset.is_virtual or dataset.external:
        raise UserError(f"{path}: {name!r} is not a dataset that holds its own rows; prepare the folder again")
    wanted = (np.dtype(array.dtype), (count, *array.shape))
    if (dataset.dtype, dataset.shape) != wanted:
        raise UserError(
            f"{path}: array {name!r} is {dataset.dtype} {dataset.shape}, the manifest says {wanted[0]} {wanted[1]}; "
            "prepare the folder again"
        )
    if count == 0:
        return np.empty(wanted[1], wanted[0])
    offset = dataset.id.get_offset()
    if offset is None:
        return ChunkedRows(path, name)
    return np.memmap(path, wanted[0], "r", offset, wanted[1])


def write_rows(path: Path, arrays: dict[str, np.ndarray], compression: str | None = None) -> None:
    """Write arrays of one length to a new file, and see it onto the disk.

    Args:
        path: of the file.
        arrays: name -> (n, ...).
        compression: None: contiguous, so that rows can be memory-mapped; or an HDF5 filter, "gzip" or "lzf".
    """
    with h5py.File(path, "w") as handle:
        for name, rows in arrays.items():
            packed = compression if len(rows) else None
            handle.create_dataset(name, data=rows, compression=packed)
    sync(path)


def sync(path: Path) -> None:
    """Make a file's content, or a folder's entries, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
