from __future__ import annotations

import math

import pytest

from hvdist import Schedule


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (Schedule(), {0.0: 1.0, 2.5: 1.0, 5.0: 1.0}),
        (Schedule("step", milestones=[2, 4], gamma=0.5), {0.0: 1.0, 1.99: 1.0, 2.0: 0.5, 3.9: 0.5, 4.0: 0.25}),
        (Schedule("cosine"), {0.0: 1.0, 2.5: 0.5, 5.0: 0.0, 1.25: 0.5 * (1 + math.cos(math.pi / 4))}),
        (Schedule(warmup=2.0), {0.0: 0.0, 1.0: 0.5, 2.0: 1.0, 3.0: 1.0}),
        (Schedule("cosine", warmup=1.0), {0.5: 0.5, 1.0: 1.0, 3.0: 0.5, 5.0: 0.0}),
        (Schedule("cosine"), {5.1: 0.0}),
    ],
)
def test_factors_by_hand(schedule: Schedule, factors: dict[float, float]) -> None:
    assert {at: schedule.factor(at, of=5.0) for at in factors} == pytest.approx(factors)
