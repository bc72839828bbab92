"""Learning-rate schedules as pure functions of the epochs done."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """The factor on the first learning rate.

    >>> Schedule("step", milestones=[3, 4]).factor(3.5, of=5)
    0.1
    """

    schedule: Literal["constant", "step", "cosine"] = "constant"
    """How the learning rate goes on after the warm-up: constant, step (times `gamma` at each milestone) or cosine
    (down to 0 at the end of the run)."""
    warmup: float = 0.0
    """Epochs over which the learning rate first rises in a line from 0."""
    milestones: Sequence[float] = field(default_factory=list)
    """Epochs at which `step` multiplies the rate by `gamma`."""
    gamma: float = 0.1
    """Factor of `step`."""

    @property
    def constant(self) -> bool:
        """Whether the rate never changes."""
        return self.schedule == "constant" and self.warmup == 0

    def factor(self, epochs: float, of: float) -> float:
        """At a point of the run.

        Args:
            epochs: done, in [0, of].
            of: epochs of the whole run.
        """
        if epochs < self.warmup:
            return epochs / self.warmup
        if self.schedule == "step":
            return self.gamma ** sum(epochs >= milestone for milestone in self.milestones)
        if self.schedule == "cosine":
            done = (epochs - self.warmup) / max(of - self.warmup, 1e-9)
            return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        return 1.0
