"""`hvdist bench mean`."""

# No `from __future__ import annotations`: the command line would import every name above to resolve it, MPI too.

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from hvdist.algorithms.sync import Sync
from hvdist.bench.timing import Timed, medians, on_ranks, print_ratios
from hvdist.buffers import zeros
from hvdist.driver import Driver
from hvdist.models import mlp
from hvdist.prepare import Packing, Table, write_folders
from hvdist.progress import Progress
from hvdist.questions import Answer, Gradient
from hvdist.replica import Replica
from hvdist.shards import Shards, Stream
from hvdist.task import Task

if TYPE_CHECKING:
    from hvdist.comm import Comm

_PLAIN, _OURS = "plain hvd.DistributedOptimizer", "hvdist sync"
_STEPS = 20
_ROWS, _SHAPE, _CLASSES = 8192, (1, 28, 28), 10


def mean(elements: int = 1_000_000, batch: int = 64, hidden: list[int] = [256, 128], rounds: int = 30) -> None:  # noqa: B006
    """Time the mean over two ranks, and the steps of sync, beside a plain Horovod script.

    Args:
        elements: Length of the averaged vector, float32.
        batch: Rows of one rank in a step.
        hidden: Widths of the model that is trained.
        rounds: Of which the median is taken.
    """
    if not on_ranks(2):
        return
    from hvdist.comm import init

    comm = init(Sync())
    vector = zeros(elements).normal_()
    from mpi4py import MPI

    timed: dict[str, Timed] = {
        "mpi4py Allreduce": lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, vector.numpy()),
        "hvdist comm.mean": lambda: comm.mean(vector),
    }
    result = medians(timed, rounds, comm.barrier)
    if comm.leads:
        print(f"mean of {elements:,} float32 over 2 ranks, medians of {rounds} interleaved rounds\n")
        print_ratios(result, "mpi4py Allreduce")
    _steps(comm, batch, hidden, rounds)
    comm.close()


def _steps(comm: "Comm", batch: int, hidden: list[int], rounds: int) -> None:
    """Steps of sync, from shards on disk, beside a plain Horovod script with its rows in memory."""
    with tempfile.TemporaryDirectory() as folder:
        shards = _shards(comm, Path(folder))
        steps = {_PLAIN: _horovod(shards, batch, hidden), _OURS: _sync(comm, shards, batch, hidden)}
        timed: dict[str, Timed] = {name: _several(role) for name, role in steps.items()}
        medians(timed, 3)
        result = medians(timed, rounds)
    if comm.leads:
        print(f"\n{_STEPS} steps of an MLP 784-{'-'.join(map(str, hidden))}-10, {batch} rows a rank\n")
        print_ratios(result, _PLAIN)
        print(f"\nsync takes {result[_PLAIN] / result[_OURS]:.3f} x the steps per second of the plain script; bar 0.97")


def _several(steps: Iterator[None]) -> Timed:
    """Some steps in a row, as training takes them: one would meet Horovod's cycle at a random point."""
    return lambda: [next(steps) for _ in range(_STEPS)]


def _shards(comm: "Comm", folder: Path) -> Shards:
    """Random rows, in a folder of the leader's."""
    where = Path(comm.broadcast_bytes(str(folder).encode()).decode()) / "rows"
    if comm.leads:
        generator = np.random.default_rng(0)
        x = generator.integers(0, 256, (_ROWS, *_SHAPE), dtype=np.uint8)
        table = Table(x, generator.integers(0, _CLASSES, _ROWS))
        write_folders(where, {"train": table}, "random", Packing(shards=2))
    comm.barrier()
    return Shards(where / "train", comm)


def _sync(comm: "Comm", shards: Shards, batch: int, hidden: list[int]) -> Iterator[None]:
    """A step of sync at every turn, as the trainer takes them."""
    torch.manual_seed(0)
    model = mlp(_SHAPE, _CLASSES, hidden)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.01))
    driver, task = Driver(comm, replica), Task(model)
    driver.start(Stream(shards, batch), Progress(len(shards), epochs=1e9))
    role = Sync().learner(comm, replica)
    reply: Answer | bool | None = None
    while True:
        question = role.send(reply)
        if isinstance(question, Gradient):
            task.backward(driver.begin(question))
            reply = driver.end()
        else:
            reply = driver.count(question)
            yield


def _horovod(shards: Shards, batch: int, hidden: list[int]) -> Iterator[None]:
    """A step of a plain Horovod script at every turn."""
    import horovod.torch as hvd

    torch.manual_seed(0)
    model = mlp(_SHAPE, _CLASSES, hidden)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    rows = shards.rows(np.arange(len(shards)))
    loss = nn.CrossEntropyLoss()
    for start in itertools.cycle(range(0, len(shards) - batch, batch)):
        optimizer.zero_grad()
        x = rows.x[start : start + batch].float().div_(255)
        loss(model(x), rows.y[start : start + batch]).backward()
        optimizer.step()
        yield
