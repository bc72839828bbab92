"""Synchronous SGD: every learner computes a gradient, their mean is the step. The baseline.

Source: Horovod (Sergeev and Del Balso 2018, arXiv:1802.05799).

| role | ranks | what it does |
|---|---|---|
| learner | all | computes its part of the global batch; takes the same step as every other learner |

Messages: one mean of the gradient (d,) float32 a step, in pieces: by Horovod while the backward pass still runs, the
piece that comes last by MPI's own allreduce.
One learner is plain SGD. It ends when the driver says so: all learners count the same samples.
A mean gradient that is not finite is the same on all learners, so all refuse it together.
Buffers (BatchNorm): each learner has its own; before the model is evaluated or saved, floating ones are averaged and
integers kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvdist.algorithm import Algorithm, Role
from hvdist.messages import Communicator
from hvdist.questions import NOT_FINITE, Gradient, Update
from hvdist.replica import Replica
from hvdist.roles import Seat


@dataclass(frozen=True)
class Sync(Algorithm):
    """Synchronous SGD by allreduce: the baseline."""

    name: ClassVar[str] = "sync"
    collective: ClassVar[tuple[str, ...]] = ("learner",)

    @property
    def seats(self) -> tuple[Seat, ...]:
        """Every rank learns."""
        return (Seat("learner"),)

    def learner(self, comm: Communicator, replica: Replica) -> Role:
        """Step along the mean gradient until the driver says to stop."""
        going = True
        while going:
            answer = yield Gradient(mean=True)
            if answer.finite:
                replica.step()
                going = yield Update(answer.samples)
            else:
                going = yield Update(0, refused=NOT_FINITE, culprits=answer.culprits)
        self.collect(comm, replica)

    def collect(self, comm: Communicator, replica: Replica) -> None:
        """Average the floating buffers over the learners."""
        buffers = replica.float_buffers
        if buffers.numel():
            replica.load_float_buffers(comm.mean(buffers))
