"""What MPI and Horovod say of themselves."""

from __future__ import annotations

import importlib.util
import socket

import numpy as np
from mpi4py import MPI

_NAME_BYTES = 64
_LEVELS = {
    MPI.THREAD_SINGLE: "SINGLE",
    MPI.THREAD_FUNNELED: "FUNNELED",
    MPI.THREAD_SERIALIZED: "SERIALIZED",
    MPI.THREAD_MULTIPLE: "MULTIPLE",
}


def library() -> str:
    """The MPI library and its version."""
    return MPI.Get_library_version().split(",")[0].strip("\x00 \n")


def thread_level() -> str:
    """MPI's thread level in this process; Horovod needs MULTIPLE."""
    return _LEVELS[MPI.Query_thread()]


def rank_and_hosts() -> tuple[int, list[str]]:
    """This rank, and the host of every rank. Collective over the world."""
    world = MPI.COMM_WORLD
    name = np.frombuffer(socket.gethostname().encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0"), np.uint8)
    names = np.empty((world.size, _NAME_BYTES), np.uint8)
    world.Allgather(name, names)
    return world.rank, [row.tobytes().rstrip(b"\0").decode() for row in names]


def horovod_build() -> str | None:
    """What Horovod's torch module was built with; None if it is not installed.

    Raises:
        ImportError: it is installed and cannot be loaded.
    """
    if importlib.util.find_spec("horovod") is None:
        return None
    import horovod.torch as horovod

    parts = {"MPI": horovod.mpi_built(), "Gloo": horovod.gloo_built(), "NCCL": horovod.nccl_built()}
    return " ".join(name for name, built in parts.items() if built) or "nothing"
