from __future__ import annotations

import json

import pytest

from hvdist import Schedule, UserError
from hvdist.progress import Progress
from hvdist.questions import NOT_FINITE, TOO_STALE, Update


def test_a_run_of_epochs_ends_with_its_samples() -> None:
    progress = Progress(rows=100, epochs=1.5)
    for _ in range(2):
        progress.count(Update(60))
    assert (progress.updates, progress.samples, progress.epochs, progress.done) == (2, 120, 1.2, False)
    assert progress.fraction == pytest.approx(0.8)
    progress.count(Update(30))
    assert progress.done


def test_a_run_of_updates_ends_with_them() -> None:
    progress = Progress(rows=100, epochs=1.0, updates=3)
    for _ in range(3):
        assert not progress.done
        progress.count(Update(100))
    assert progress.done
    assert progress.fraction == 1.0


def test_the_schedule_stretches_over_the_run() -> None:
    for progress in (Progress(100, 2.0, schedule=Schedule("cosine")), Progress(100, 9.0, 2, Schedule("cosine"))):
        assert progress.lr_factor == pytest.approx(1.0)
        progress.count(Update(100))
        assert progress.lr_factor == pytest.approx(0.5)
        progress.count(Update(100))
        assert progress.lr_factor == pytest.approx(0.0, abs=1e-6)
    assert Progress(100).lr_factor is None  # the rate is whoever's it is


def test_refusals_are_counted_apart_from_updates() -> None:
    progress = Progress(100)
    progress.count(Update(0, 2, NOT_FINITE, (2,)))
    progress.count(Update(0, 2, TOO_STALE, (2,)))
    progress.count(Update(10, 1, measures={"staleness": 3.0, "drift": 0.5}))
    progress.count(Update(10, 2, measures={"staleness": 1.0}))
    assert (progress.updates, progress.samples) == (2, 20)
    assert progress.turns == {1: 1, 2: 3}
    assert progress.refused == {NOT_FINITE: {2: 1}, TOO_STALE: {2: 1}}
    assert progress.staleness == {3: 1, 1: 1}
    assert progress.measures == {"staleness": (4.0, 2, 3.0), "drift": (0.5, 1, 0.5)}


def test_a_run_whose_gradients_are_mostly_not_finite_is_ended() -> None:
    progress = Progress(100)
    for _ in range(25):
        progress.count(Update(0, source=1))
    for _ in range(75):
        progress.count(Update(0, 2, NOT_FINITE, (2,)))
    with pytest.raises(UserError, match=r"76 of the last 100 gradients were not finite \(rank 2: 76\)"):
        progress.count(Update(0, 2, NOT_FINITE, (2,)))


def test_one_bad_worker_in_two_does_not_end_a_run() -> None:
    progress = Progress(100_000)
    for _ in range(500):
        progress.count(Update(1, 1))
        progress.count(Update(0, 2, NOT_FINITE, (2,)))
    assert progress.refused[NOT_FINITE][2] == 500


def test_stale_gradients_never_end_a_run() -> None:
    progress = Progress(100)
    for _ in range(500):
        progress.count(Update(0, 2, TOO_STALE, (2,)))


def test_progress_survives_json() -> None:
    progress, restored = Progress(100), Progress(100)
    progress.count(Update(10, 1, measures={"staleness": 3.0}))
    progress.count(Update(0, 2, NOT_FINITE, (2,)))
    restored.restore(json.loads(json.dumps(progress.state())))
    assert restored.state() == progress.state()
    assert restored.turns == progress.turns
    assert restored.refused == progress.refused
