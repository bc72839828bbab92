"""What a role may ask of whoever drives it, and the answers.

A role *yields* a question and is *sent* its answer; it never computes a gradient itself. That is what lets one role be
driven by the ready-made trainer, by the user's own loop, by a simulator or by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

EVERYONE = -1
NOT_FINITE = "not finite"
TOO_STALE = "too stale"


@dataclass(frozen=True)
class Gradient:
    """The gradient of the mean loss over a batch, please. Answered by an `Answer`.

    Attributes:
        samples: (B,) int64 positions of the wanted rows; None: the next batch in data order.
        weights: (B,) float32, no unit: the factor of each row's loss; None: all one.
        mean: also average over the ranks of my role, each weighted by its examples. Asked for together with the
            gradient, so that the driver can overlap the averaging with the backward pass.
    """

    samples: Tensor | None = None
    weights: Tensor | None = None
    mean: bool = False


class Answer(NamedTuple):
    """The answer to `Gradient`: it is in the replica now, for `replica.step()` or `replica.grad`.

    Attributes:
        samples: examples behind it, those of all ranks of the role where the mean was asked for.
        finite: whether it is; no use may be made of one that is not.
        culprits: ranks whose own gradient was not finite, where known.
    """

    samples: int
    finite: bool = True
    culprits: tuple[int, ...] = ()


@dataclass(frozen=True)
class Update:
    """This replica took a step, or refused to. Answered by True while the run should go on, else False.

    Attributes:
        samples: examples behind the step; 0 if it was refused.
        source: rank whose gradient it was; EVERYONE: the mean of all ranks of the role.
        refused: why the gradient was not applied, "not finite" or "too stale"; empty if it was.
        culprits: ranks to count the refusal against, where they are known.
        measures: what the algorithm measured, name -> value; it goes into the record.
    """

    samples: int
    source: int = EVERYONE
    refused: str = ""
    culprits: tuple[int, ...] = ()
    measures: Mapping[str, float] = field(default_factory=dict)


Question = Gradient | Update
