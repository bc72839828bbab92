"""Means over the ranks of one role: by Horovod where it is installed, else by MPI's own allreduce."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hvdist.errors import UserError

log = logging.getLogger("hvdist")


_PIECE = 1 << 28
"""Elements of one MPI allreduce."""


class Averaging:
    """Means in place, matched between the ranks by name."""

    def start(self, tensor: Tensor, name: str) -> Any:
        """Begin; the tensor is contiguous float32 or float64 and not to be touched until `finish`."""
        return None

    def finish(self, pending: Any) -> None:
        """Wait for what `start` returned."""

    def shutdown(self) -> None:
        """Free what it holds. Collective."""


class Alone(Averaging):
    """The mean over one rank."""


class HorovodAveraging(Averaging):
    """Horovod on a sub-communicator; its own thread reduces while the backward pass goes on."""

    def __init__(self, peers: MPI.Intracomm) -> None:
        import horovod.torch as horovod

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

    def shutdown(self) -> None:
        """Stop Horovod's thread."""
        self._horovod.shutdown()


class MpiAveraging(Averaging):
    """MPI's allreduce, when the mean is asked for: nothing overlaps, so all ranks must finish in the same order."""

    def __init__(self, peers: MPI.Intracomm) -> None:
        self._peers = peers

    def start(self, tensor: Tensor, name: str) -> Any:
        """Nothing yet."""
        return tensor

    def finish(self, pending: Any) -> None:
        """Reduce, then divide."""
        for piece in pending.reshape(-1).split(_PIECE):
            self._peers.Allreduce(MPI.IN_PLACE, piece.numpy())
            piece.div_(self._peers.size)


def averaging_over(peers: MPI.Intracomm) -> Averaging:
    """The best way all peers have. Collective over them."""
    if peers.size == 1:
        return Alone()
    everywhere = np.array([importlib.util.find_spec("horovod") is not None], np.uint8)
    peers.Allreduce(MPI.IN_PLACE, everywhere, MPI.MIN)
    if everywhere[0]:
        return HorovodAveraging(peers)
    if peers.rank == 0:
        log.warning(
            "Horovod is not installed on every rank: averaging by MPI's allreduce, without overlap with the backward "
            "pass. To change it: bash jobs/setup.sh with a C++ compiler on PATH"
        )
    return MpiAveraging(peers)


def averaged(averaging: Averaging, tensor: Tensor) -> Tensor:
    """The mean of any float tensor, in place: half types are summed in float32, strided ones through a copy."""
    wide = tensor.dtype if tensor.dtype == torch.float64 else torch.float32
    if not tensor.is_floating_point():
        raise ValueError(f"a mean needs a floating dtype, got {tensor.dtype}")
    flat = tensor.detach().to(wide).contiguous()
    averaging.finish(averaging.start(flat, "mean"))
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat)
    return tensor
