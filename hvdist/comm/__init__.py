"""Roles on MPI: start-up and its checks, messages on mpi4py, collectives on Horovod. Nothing else imports either."""

from hvdist.comm.comm import Comm
from hvdist.comm.start import init

__all__ = ["Comm", "init"]
