"""Reading shard folders: rows by position, and an epoch's batches for each of the ranks that share it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hvdist.errors import UserError
from hvdist.hdf5 import Rows, open_rows
from hvdist.manifest import NAME, Manifest, read_manifest
from hvdist.order import PLANS, Order, Plan

if TYPE_CHECKING:
    from hvdist.comm import Comm

# Rows are gathered for several batches at once, which costs numpy's overhead once.
_GATHERED_BYTES = 8 << 20


class Batch(NamedTuple):
    """Rows of one step.

    Attributes:
        x: (B, ...), in the dtype they are stored in.
        y: (B,) int64, classes.
        positions: (B,) int64 in [0, n), where the rows stand in the folder.
        total: rows of this step over all ranks that share the epoch.
    """

    x: Tensor
    y: Tensor
    positions: Tensor
    total: int


class Shards:
    """A folder of shards, seen by one rank.

    Args:
        folder: with `manifest.json` inside, such as "shards/fashion-mnist/train".
        comm: the communicator: the ranks of this rank's role share every epoch. The leader alone reads and checks the
            folder's manifest, so construction is collective over the world. None: one reader, alone.
        order: of an epoch's rows: "global", one permutation of all rows cut over the ranks, or "local", every rank
            permutes its own contiguous rows (see `hvdist.order`).
        seed: of the permutations, together with the epoch.
    Raises:
        UserError: a file is missing, truncated, or not what the manifest says.
    """

    def __init__(self, folder: str | Path, comm: Comm | None = None, *, order: Order = "global", seed: int = 0) -> None:
        self.folder = Path(folder)
        self.order = order
        self.seed = seed
        if order not in PLANS:
            raise UserError(f"order is {' or '.join(PLANS)}, got {order!r}")
        self.manifest = self._read_manifest(comm)
        self.readers = len(comm.peers) if comm else 1
        self.reader = comm.peers.index(comm.rank) if comm else 0
        self._ends = np.cumsum([file.rows for file in self.manifest.files])
        self._opened: dict[int, dict[str, Rows]] = {}

    def _read_manifest(self, comm: Comm | None) -> Manifest:
        if comm is None or comm.leads:
            manifest = read_manifest(self.folder)
            check_files(self.folder, manifest)
            if comm:
                comm.broadcast_bytes(manifest.dumps().encode())
            return manifest
        return Manifest.loads(comm.broadcast_bytes().decode(), self.folder / NAME)

    def __len__(self) -> int:
        return self.manifest.rows

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one row's x."""
        return self.manifest.arrays["x"].shape

    @property
    def classes(self) -> int:
        """Largest label + 1."""
        return max(self.manifest.classes) + 1

    def steps(self, batch: int) -> int:
        """Steps of one epoch, the same on every rank."""
        return -(-len(self) // (batch * self.readers)) if self.order == "global" else -(-self._most_rows // batch)

    @property
    def _most_rows(self) -> int:
        return -(-len(self) // self.readers)

    def rows(self, positions: Tensor | Sequence[int] | np.ndarray) -> Batch:
        """Rows by position, in the order given; duplicates allowed.

        Args:
            positions: (B,) integers in [0, n).
        Raises:
            IndexError: a position outside; negative ones do not count from the end.
        """
        wanted = np.asarray(positions, dtype=np.int64).reshape(-1)
        outside = (wanted < 0) | (wanted >= len(self))
        if outside.any():
            raise IndexError(f"no row {wanted[outside][0]}: {self.folder} has rows 0 to {len(self) - 1}")
        x, y = (torch.from_numpy(self._gathered(name, wanted)) for name in ("x", "y"))
        return Batch(x, y, torch.from_numpy(wanted), len(wanted))

    def batches(self, batch: int, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This rank's batches of one epoch, one a step.

        Together the ranks read every row exactly once. Where other ranks still have rows and this one has none, its
        batch is empty, so that all take the same steps.

        Args:
            batch: rows of one rank in a full step.
            epoch: 0, 1, ...; each has its own permutation.
            start: rows of the epoch, over all ranks, that were read before.
        """
        plan = PLANS[self.order](len(self), self.readers, self.reader, batch, self.seed, epoch, start)
        for steps in self._groups(plan, batch):
            first = int(plan.sizes[: steps.start].sum())
            sizes = plan.sizes[steps]
            gathered = self.rows(plan.positions[first : first + sizes.sum()])
            cuts = [part.split(sizes.tolist()) for part in gathered[:3]]
            yield from map(Batch, *cuts, plan.totals[steps].tolist())

    def _groups(self, plan: Plan, batch: int) -> Iterator[slice]:
        """Steps whose rows are gathered at once."""
        x = self.manifest.arrays["x"]
        row_bytes = int(np.prod(x.shape, dtype=np.int64)) * np.dtype(x.dtype).itemsize
        at_once = max(1, _GATHERED_BYTES // max(1, batch * row_bytes))
        for first in range(0, len(plan.sizes), at_once):
            yield slice(first, first + at_once)

    def _gathered(self, name: str, positions: np.ndarray) -> np.ndarray:
        array = self.manifest.arrays[name]
        out = np.empty((len(positions), *array.shape), array.dtype)
        places = np.searchsorted(self._ends, positions, side="right")
        for place in np.unique(places).tolist():
            there = np.flatnonzero(places == place)
            begin = self._ends[place - 1] if place else 0
            out[there] = self._rows(place)[name][positions[there] - begin]
        return out

    def _rows(self, place: int) -> dict[str, Rows]:
        if place not in self._opened:
            self._opened[place] = open_rows(self.folder, self.manifest.files[place], self.manifest.arrays)
        return self._opened[place]


class Stream:
    """One rank's batches without end, epoch after epoch, with a cursor.

    Attributes:
        epoch: of the next batch.
        read: rows of that epoch, over all ranks, that come before it.
    """

    def __init__(self, shards: Shards, batch: int, epoch: int = 0, read: int = 0) -> None:
        self.shards, self.batch = shards, batch
        self.epoch, self.read = epoch, read
        self._batches = shards.batches(batch, epoch, read)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        while (batch := next(self._batches, None)) is None:
            self.epoch, self.read = self.epoch + 1, 0
            self._batches = self.shards.batches(self.batch, self.epoch)
        self.read += batch.total
        return batch


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compare every file with the manifest: there, whole, the right arrays. Reads no row.

    Raises:
        UserError: naming the file, what was got and what is needed.
    """
    if sum(file.rows for file in manifest.files) != manifest.rows or not manifest.rows:
        raise UserError(f"{folder / NAME}: the files do not add up to {manifest.rows} rows; prepare the folder again")
    for file in manifest.files:
        open_rows(folder, file, manifest.arrays)
