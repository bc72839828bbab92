"""How far a run is: what was applied and refused, the learning rate now, and whether to go on."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from hvdist.errors import UserError
from hvdist.questions import EVERYONE, NOT_FINITE, Update
from hvdist.schedule import Schedule

_WATCHED = 100
_TOO_MANY = 0.75


class Progress:
    """Counts one replica's updates.

    Args:
        rows: of an epoch.
        epochs: length of the run, unless `updates` is given.
        updates: length of the run in updates; the schedule then stretches over them.
        schedule: of the learning rate.

    Attributes:
        updates: applied so far.
        samples: examples behind them.
        turns: rank -> batches whose gradient came, refused ones too; EVERYONE: steps of all ranks together.
        refused: reason -> rank -> gradients refused; EVERYONE where the rank is not known.
        staleness: staleness -> updates.
        measures: name -> (sum, count, largest), over the whole run.
    """

    def __init__(
        self, rows: int, epochs: float = 1.0, updates: int | None = None, schedule: Schedule = Schedule()
    ) -> None:
        self.rows = rows
        self._epochs, self._updates, self._schedule = epochs, updates, schedule
        self.updates = self.samples = 0
        self.turns: Counter[int] = Counter()
        self.refused: dict[str, Counter[int]] = {}
        self.staleness: Counter[int] = Counter()
        self.measures: dict[str, tuple[float, int, float]] = {}
        self._lately: deque[bool] = deque(maxlen=_WATCHED)

    @property
    def epochs(self) -> float:
        """Epochs done."""
        return self.samples / self.rows

    @property
    def done(self) -> bool:
        """Whether the run is at its end."""
        if self._updates is not None:
            return self.updates >= self._updates
        return self.samples >= self._epochs * self.rows

    @property
    def fraction(self) -> float:
        """Of the run that is done, 0 to 1."""
        return self.updates / self._updates if self._updates is not None else self.epochs / self._epochs

    @property
    def lr_factor(self) -> float | None:
        """On the first learning rate, at this point of the run; None if no schedule changes it."""
        if self._schedule.constant:
            return None
        of = self._epochs if self._updates is None else self.epochs / max(self.fraction, 1e-9)
        return self._schedule.factor(self.epochs, of)

    def count(self, update: Update) -> None:
        """Take note of an update.

        Raises:
            UserError: most of the last gradients were not finite.
        """
        self.turns[update.source] += 1
        self._lately.append(update.refused == NOT_FINITE)
        if update.refused:
            self.refused.setdefault(update.refused, Counter()).update(update.culprits or (EVERYONE,))
            self._end_if_most_were_refused()
            return
        self.updates += 1
        self.samples += update.samples
        for name, value in update.measures.items():
            summed, count, largest = self.measures.get(name, (0.0, 0, value))
            self.measures[name] = (summed + value, count + 1, max(largest, value))
        if "staleness" in update.measures:
            self.staleness[int(update.measures["staleness"])] += 1

    def _end_if_most_were_refused(self) -> None:
        if len(self._lately) == _WATCHED and sum(self._lately) > _TOO_MANY * _WATCHED:
            by_rank = self.refused[NOT_FINITE]
            ranks = ", ".join(f"rank {rank}: {count}" if rank >= 0 else f"{count}" for rank, count in by_rank.items())
            raise UserError(
                f"{sum(self._lately)} of the last {_WATCHED} gradients were not finite ({ranks}): the run has diverged "
                "or the data are bad. Lower --lr, or look for NaN and huge values in the shards of those ranks"
            )

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "updates": self.updates,
            "samples": self.samples,
            "turns": dict(self.turns),
            "refused": {reason: dict(counts) for reason, counts in self.refused.items()},
            "staleness": dict(self.staleness),
            "measures": {name: list(sums) for name, sums in self.measures.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, as JSON gives it back."""
        self.updates, self.samples = state["updates"], state["samples"]
        self.turns = _counter(state["turns"])
        self.refused = {reason: _counter(counts) for reason, counts in state["refused"].items()}
        self.staleness = _counter(state["staleness"])
        self.measures = {name: (s, n, m) for name, (s, n, m) in state["measures"].items()}


def _counter(counts: Mapping[str, int]) -> Counter[int]:
    return Counter({int(key): count for key, count in counts.items()})
