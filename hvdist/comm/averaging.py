"""Means over the ranks of one role."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hvdist.comm.patience import Patience
from hvdist.errors import UserError

log = logging.getLogger("hvdist")


_PIECE = 1 << 28
"""Elements of one MPI allreduce."""


class Averaging:
    """Means over `peers`, in place: at once by MPI's allreduce, or in the background where there is a Horovod.

    What cannot overlap with anything does not go through Horovod: its thread looks for work once in a millisecond, and
    that is longer than the allreduce of a million numbers takes.
    """

    def __init__(self, peers: MPI.Intracomm, patience: Patience) -> None:
        self._peers, self._patience = peers, patience

    def mean(self, tensor: Tensor) -> None:
        """Average a contiguous float32 or float64 tensor. Collective.

        Raises:
            UserError: a peer has left, and will never come to this mean.
        """
        if self._peers.size == 1:
            return
        if self._meet(leaving=False):
            raise UserError(
                "another rank of this role has left while this one still averages: leave a loop early on all ranks "
                "of a role that averages, or on none"
            )
        for piece in tensor.view(-1).split(_PIECE):
            self._peers.Allreduce(MPI.IN_PLACE, piece.numpy())
            piece.div_(self._peers.size)

    def start(self, tensor: Tensor, name: str) -> Any:
        """Begin averaging; here, only remember what `finish` will do, so all peers must finish in the same order."""
        return tensor

    def finish(self, pending: Any) -> None:
        """Wait for what `start` returned."""
        self.mean(pending)

    def leave(self, deadline_seconds: float) -> None:
        """Average no more. Collective.

        Raises:
            TimeoutError: the peers did not leave in time.
        """
        self._meet(leaving=True, deadline_seconds=deadline_seconds)

    def _meet(self, leaving: bool, deadline_seconds: float = float("inf")) -> bool:
        """Wait for all peers, without burning the core as MPI does when it waits; whether one of them is leaving."""
        mine, anyone = np.array([leaving], np.uint8), np.empty(1, np.uint8)
        self._patience.until(self._peers.Iallreduce(mine, anyone, MPI.MAX).Test, deadline_seconds)
        return bool(anyone[0])


class HorovodAveraging(Averaging):
    """Started means are Horovod's: its own thread reduces while the backward pass goes on, matching them by name."""

    def __init__(self, peers: MPI.Intracomm, patience: Patience) -> None:
        import horovod.torch as horovod

        super().__init__(peers, patience)
        if horovod.is_initialized():
            raise UserError("Horovod is initialised already; leave that to hvdist.init, for this role's ranks")
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise UserError(
                "Horovod beside mpi4py needs MPI's thread level MULTIPLE; this MPI gives less. Unset "
                "MPI4PY_RC_THREADS and MPI4PY_RC_THREAD_LEVEL, or load an MPI built with thread support"
            )
        self._horovod = horovod
        horovod.init(comm=peers)

    def start(self, tensor: Tensor, name: str) -> Any:
        """Hand it to Horovod's thread."""
        return self._horovod.allreduce_async_(tensor, name=name, op=self._horovod.Average)

    def finish(self, pending: Any) -> None:
        """Wait for Horovod's thread."""
        self._horovod.synchronize(pending)

    def leave(self, deadline_seconds: float) -> None:
        """Stop Horovod's thread: peers that still wait for it fail then, and do not wait for ever."""
        self._horovod.shutdown()
        super().leave(deadline_seconds)


def averaging_over(peers: MPI.Intracomm, patience: Patience) -> Averaging:
    """The best way all peers have. Collective over them."""
    if peers.size == 1:
        return Averaging(peers, patience)
    everywhere = np.array([importlib.util.find_spec("horovod") is not None], np.uint8)
    peers.Allreduce(MPI.IN_PLACE, everywhere, MPI.MIN)
    if everywhere[0]:
        return HorovodAveraging(peers, patience)
    if peers.rank == 0:
        log.warning(
            "Horovod is not installed on every rank: averaging by MPI's allreduce, without overlap with the backward "
            "pass. To change it: bash jobs/setup.sh with a C++ compiler on PATH"
        )
    return Averaging(peers, patience)


def averaged(averaging: Averaging, tensor: Tensor) -> Tensor:
    """The mean of any float tensor, in place: half types are summed in float32, strided ones through a copy."""
    if not tensor.is_floating_point():
        raise ValueError(f"a mean needs a floating dtype, got {tensor.dtype}")
    wide = tensor.dtype if tensor.dtype == torch.float64 else torch.float32
    flat = tensor.detach().to(wide).contiguous()
    averaging.mean(flat)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat)
    return tensor
