"""What is learned: a model, a loss and rows make the answers to a role's questions.

To answer one differently (augmentation, another loss, other inputs), override one method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvdist.shards import Batch, Shards

Loss = Callable[[Tensor, Tensor], Tensor]
"""(B, C) outputs and (B,) classes -> (B,) float32, the loss of every row."""

EVALUATED_AT_ONCE = 1000


@dataclass(frozen=True)
class Score:
    """An evaluation: mean loss, and the fraction of rows classified wrongly."""

    loss: float
    error: float


class Task:
    """Answers questions about one model.

    Args:
        model: maps (B, ...) inputs to (B, C) outputs.
        loss: of every row, unreduced; cross entropy if not given.
    """

    def __init__(self, model: nn.Module, loss: Loss | None = None) -> None:
        self.model = model
        self.loss: Loss = loss or cross_entropy

    def inputs(self, x: Tensor) -> Tensor:
        """Stored rows as the model takes them: bytes are scaled from 0..255 to 0..1, floats become float32."""
        if x.dtype == torch.uint8:
            return x.float().div_(255)
        return x.float() if x.is_floating_point() else x

    def backward(self, batch: Batch, weights: Tensor | None = None) -> None:
        """Accumulate the gradient of the batch's mean loss into the model's parameters.

        Args:
            batch: (B, ...) rows.
            weights: (B,) float32 factors of each row's loss; all one if not given.
        """
        losses = self.loss(self.model(self.inputs(batch.x)), batch.y)
        (losses if weights is None else weights * losses).mean().backward()

    @torch.no_grad()
    def evaluate(self, shards: Shards, positions: Iterable[int] | None = None) -> Score:
        """Mean loss and error over rows, all of them if not given, with the model in evaluation mode."""
        was_training = self.model.training
        self.model.eval()
        chosen = torch.arange(len(shards)) if positions is None else torch.tensor(list(positions))
        loss = wrong = 0.0
        for some in chosen.split(EVALUATED_AT_ONCE):
            batch = shards.rows(some)
            outputs = self.model(self.inputs(batch.x))
            loss += float(self.loss(outputs, batch.y).double().sum())
            wrong += float((outputs.argmax(1) != batch.y).sum())
        self.model.train(was_training)
        return Score(loss / len(chosen), wrong / len(chosen))


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """(B,) cross entropy of every row."""
    return functional.cross_entropy(outputs, y, reduction="none")
