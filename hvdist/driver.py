"""What every driver of a role does: check that the ranks agree, answer for gradients in two halves, count updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from hvdist.overlap import OverlappedMean
from hvdist.progress import Progress
from hvdist.questions import Answer, Gradient, Update
from hvdist.replica import Replica, is_finite
from hvdist.shards import Batch, Stream

if TYPE_CHECKING:
    from hvdist.comm import Comm


class Driver:
    """Answers for one rank. Whoever holds it runs the backward pass between `begin` and `end`.

    Args:
        comm: the communicator.
        replica: this rank's.
    Raises:
        UserError: the model, its parameters or its optimizer differ from the leader's.
    """

    def __init__(self, comm: Comm, replica: Replica) -> None:
        comm.agree(replica.structure(), "the model or its optimizer")
        comm.agree(replica.checksum().hex(), "the checksum of the model's parameters")
        self.comm, self.replica = comm, replica
        self._mean = OverlappedMean(replica, comm)
        self._asked: Gradient = Gradient()
        self._batch: Batch | None = None

    def start(self, stream: Stream, progress: Progress) -> None:
        """From now on take rows from `stream`, and count towards the end that `progress` knows."""
        self.stream, self.progress = stream, progress
        self._follow_schedule()

    def begin(self, question: Gradient) -> Batch:
        """The rows asked for, with no gradient yet. They may be none: then there is nothing to run."""
        batch = self._rows(question.samples)
        self._asked, self._batch = question, batch
        self.replica.zero_grad()
        if question.mean:
            self._mean.arm(len(batch.y), batch.total)
        return batch

    def _rows(self, samples: Tensor | None) -> Batch:
        return next(self.stream) if samples is None else self.stream.shards.rows(samples)

    def end(self) -> Answer:
        """The answer, once the gradients of those rows are in the model's parameters."""
        if self._batch is None:
            raise RuntimeError("step() without a batch: call it once for every batch that steps() yields")
        batch, self._batch = self._batch, None
        if self._asked.mean:
            return Answer(batch.total, *self._mean.finish())
        return Answer(len(batch.y), all(is_finite(p.grad) for p in self.replica.parameters if p.grad is not None))

    def count(self, update: Update) -> bool:
        """Take note of an update; whether to go on."""
        self.progress.count(update)
        self._follow_schedule()
        return not self.progress.done

    def _follow_schedule(self) -> None:
        """Without a schedule of ours the rate is the user's, whose own scheduler may change it."""
        if (factor := self.progress.lr_factor) is not None:
            self.replica.set_lr(factor)
