"""Distributed deep learning on MPI, for the runs where allreduce is the wrong tool."""

from hvdist.algorithms import ALGORITHMS
from hvdist.algorithms.asgd import ASGD, DCASGD
from hvdist.algorithms.sync import Sync
from hvdist.errors import UserError
from hvdist.optimizer import DistributedOptimizer
from hvdist.schedule import Schedule
from hvdist.settings import Training
from hvdist.shards import Batch, Shards
from hvdist.task import Task

__all__ = [
    "ALGORITHMS",
    "ASGD",
    "DCASGD",
    "Batch",
    "DistributedOptimizer",
    "Schedule",
    "Shards",
    "Sync",
    "Task",
    "Training",
    "UserError",
    "init",
    "train",
]


def __getattr__(name: str) -> object:
    """`init` and `train` start MPI, so they are imported when first used: `import hvdist` works without it."""
    if name == "init":
        from hvdist.comm import init

        return init
    if name == "train":
        from hvdist.trainer import train

        return train
    raise AttributeError(f"module 'hvdist' has no attribute {name!r}")
