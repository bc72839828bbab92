"""Start-up: every rank learns its role, and what would go wrong later is refused now."""

from __future__ import annotations

import logging
import os
import random

import numpy as np
import torch
from mpi4py import MPI

from hvdist import launch
from hvdist.algorithm import Algorithm
from hvdist.comm.comm import Comm
from hvdist.comm.guard import watch
from hvdist.comm.patience import Patience
from hvdist.roles import Roles

_MOST_CORES = 4096


def init(algorithm: Algorithm, seed: int = 0) -> Comm:
    """Give every rank of the world its role. Collective over the world.

    Also seeds Python's, numpy's and torch's global generators alike on all ranks, so that a model built next is the
    same everywhere, and shares a node's cores between its ranks unless OMP_NUM_THREADS is set.

    Args:
        algorithm: decides the roles; the same on every rank.
        seed: of the global generators.
    Raises:
        UserError: the launcher started N worlds of one rank, the ranks cannot hold the roles, the ranks run different
            algorithms, or MPI's thread level is too low for Horovod.
    """
    guard = watch()
    _speak(leads=MPI.COMM_WORLD.rank == 0)
    launch.refuse_singletons(MPI.COMM_WORLD.size)
    roles = Roles.fill(algorithm.seats, MPI.COMM_WORLD.size)
    guard.role = roles.names[MPI.COMM_WORLD.rank]
    world = MPI.COMM_WORLD.Dup()
    cores, ranks_here = _node(world)
    comm = Comm(world, roles, Patience(crowded=ranks_here > cores), guard.role in algorithm.collective)
    guard.leave = comm.leave
    comm.agree(repr(algorithm), "the algorithm")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores // ranks_here))
    seed_everything(seed)
    return comm


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  (the user's code may draw from the legacy generator)
    torch.manual_seed(seed)


def _speak(leads: bool) -> None:
    """The leader tells what goes on, the others only what goes wrong; a script's own logging set-up comes first."""
    log = logging.getLogger("hvdist")
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("hvdist: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO if leads else logging.WARNING)


def _node(world: MPI.Intracomm) -> tuple[int, int]:
    """Cores this node lends to the job, and the job's ranks on it."""
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    cores = np.zeros(_MOST_CORES, np.uint8)
    cores[[core for core in os.sched_getaffinity(0) if core < _MOST_CORES]] = 1
    node.Allreduce(MPI.IN_PLACE, cores, MPI.MAX)
    ranks_here = node.size
    node.Free()
    return int(cores.sum()), ranks_here
