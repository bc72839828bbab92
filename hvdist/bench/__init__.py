"""Measure hvdist's hot paths beside their rivals and the physical floor, in one run, as ratios."""

from collections.abc import Callable

from hvdist.bench.mean import mean
from hvdist.bench.pushpull import pushpull
from hvdist.bench.update import update

BENCHES: dict[str, Callable[..., None]] = {"mean": mean, "pushpull": pushpull, "update": update}
