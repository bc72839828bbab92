"""Timing side by side: medians of interleaved rounds, printed as ratios to a floor."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from hvdist import launch

Timed = Callable[[], object]


def medians(timed: Mapping[str, Timed], rounds: int, before: Timed = lambda: None) -> dict[str, float]:
    """Median seconds of each, in rounds that run all of them, so that a machine's drift meets them alike.

    Args:
        timed: name -> what to time.
        rounds: how often.
        before: each timing, untimed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, function in timed.items():
            before()
            began = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def print_ratios(seconds: Mapping[str, float], floor: str, bars: Mapping[str, str] | None = None) -> None:
    """One line for each: milliseconds, the ratio to the floor, and the bar on it, where there is one."""
    for name, value in seconds.items():
        bar = (bars or {}).get(name, "")
        print(f"{name:44} {1e3 * value:10.3f} ms {value / seconds[floor]:8.2f} x  {bar}".rstrip(), flush=True)


def on_ranks(ranks: int) -> bool:
    """Whether this process is one of several ranks already; if not, run this very command on `ranks` of them."""
    if launch.claimed_size() > 1:
        return True
    command, environment = launch.mpiexec(ranks)
    command += [sys.executable, "-m", "hvdist", *sys.argv[1:]]
    print(" ".join(command), flush=True)
    if code := subprocess.run(command, env={**environment, "OMP_NUM_THREADS": "1"}, check=False).returncode:
        sys.exit(code)
    return False
