"""Any algorithm from the user's own loop, Horovod style."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hvdist.algorithm import Algorithm, Role
from hvdist.driver import Driver
from hvdist.errors import UserError
from hvdist.progress import Progress
from hvdist.questions import Answer, Gradient
from hvdist.replica import Replica
from hvdist.schedule import Schedule
from hvdist.shards import Shards, Stream
from hvdist.task import Loss, Task

if TYPE_CHECKING:
    from hvdist.comm import Comm

log = logging.getLogger("hvdist")


class DistributedOptimizer:
    """A torch optimizer whose steps are an algorithm's.

    Args:
        optimizer: from `torch.optim`, on this model's parameters; servers may run it on a slice of them.
        model: the same on every rank; float32 on the CPU. Its parameters become views into one flat vector.
        loss: (B, C) outputs and (B,) classes -> (B,) losses, as torch's with reduction="none".
        algorithm: the one given to `hvdist.init`.
        comm: what `hvdist.init` returned.
        task: answers what the algorithm asks beyond gradients; made from model and loss if not given.
    Raises:
        UserError: the ranks' models differ, or cannot be exchanged.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        loss: Loss,
        algorithm: Algorithm,
        comm: Comm,
        task: Task | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.task = task or Task(model, loss)
        self.replica = Replica(model, optimizer, seed=comm.rank)
        self._algorithm, self._comm = algorithm, comm
        self._driver = Driver(comm, self.replica)
        algorithm.prepare(comm, self.replica)
        self._stream: Stream | None = None
        self._role: Role | None = None
        self._asked: Gradient | None = None
        self._given = False
        self._answer: Answer | None = None

    def steps(
        self,
        shards: Shards,
        batch: int,
        epochs: float = 1.0,
        updates: int | None = None,
        schedule: Schedule = Schedule(),
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The batches this rank is to compute gradients for, until the run is over. Collective over the world.

        On ranks whose role does not train (a server, say) this plays the role to its end and yields nothing. Called
        again, it goes on from the leader's model, with the next epoch. Leaving the loop early leaves the run.

        Args:
            shards: the training rows.
            batch: rows of one rank in a step.
            epochs: passes over all rows, counted over all ranks.
            updates: length of the run in updates instead.
            schedule: of the learning rate; applied on the ranks that take the steps.
        Yields:
            x: (B, ...) as the model takes it: bytes scaled to 0..1.
            y: (B,) int64 classes.
            weight: (B,) float32 factor of each row's loss; ones unless the algorithm draws rows by weight.
        """
        self._start(shards, batch, Progress(len(shards), epochs, updates, schedule))
        try:
            while self._asked is not None:
                rows = self._driver.begin(self._asked)
                if not len(rows.y):  # other ranks still have rows in this step
                    self._advance(self._driver.end())
                    continue
                self._given = True
                yield self.task.inputs(rows.x), rows.y, torch.ones(len(rows.y))
                if self._given:
                    raise UserError("steps() yielded a batch and step() was not called; call it once for each batch")
        finally:
            if self._role is not None:
                self._role.close()

    def _start(self, shards: Shards, batch: int, progress: Progress) -> None:
        if self._stream is None:
            self._stream = Stream(shards, batch)
        else:
            self._comm.broadcast(self.replica.params)
            self.replica.load_float_buffers(self._comm.broadcast(self.replica.float_buffers))
            if self._stream.shards is not shards or self._stream.batch != batch:
                self._stream = Stream(shards, batch, self._stream.epoch + 1)
        self._driver.start(self._stream, progress)
        self._role = self._algorithm.play(self._comm, self.replica)
        self._comm.barrier()
        self._advance(None)

    def step(self) -> None:
        """Hand the gradients of this batch to the algorithm; the model then holds what it made of them."""
        self.synchronize()
        answer, self._answer, self._given = self._answer, None, False
        self._advance(answer)

    def synchronize(self) -> None:
        """Wait until the gradients that `step` will use are in the parameters, to clip or look at them first.

        Where the algorithm averages, they are the mean of all ranks; before, they are still on their way.
        """
        if not self._given:
            raise UserError("step() belongs inside `for x, y, weight in optimizer.steps(...)`, once for each batch")
        if self._answer is None:
            self._answer = self._driver.end()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Drop the gradients of the last step; they are never kept as zeros, so `set_to_none` changes nothing."""
        self.replica.zero_grad()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's."""
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self.optimizer.state_dict()

    def _advance(self, reply: Any) -> None:
        """Let the role go on until it asks for a gradient or ends, answering all else."""
        assert self._role is not None
        try:
            while not isinstance(question := self._role.send(reply), Gradient):
                if reply is None:
                    log.info("%s does not train: steps() plays its role to the end", self._comm.label)
                reply = self._driver.count(question)
            self._asked = question
        except StopIteration:
            self._asked = None
