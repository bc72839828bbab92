"""How a rank waits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_SPINS = 50
_FIRST_SLEEP_SECONDS = 20e-6
_LONGEST_SLEEP_SECONDS = 500e-6


class Patience:
    """Ask again until there is an answer: at once where every rank has a core, ever later where ranks share them.

    MPI's own blocking calls spin; on a crowded node that takes the core from the very rank that is waited for.
    """

    def __init__(self, crowded: bool) -> None:
        self.crowded = crowded

    def until(self, ready: Callable[[], T | None], deadline_seconds: float = float("inf")) -> T:
        """The first answer of `ready` that is neither None nor False.

        Raises:
            TimeoutError: no answer within the deadline.
        """
        give_up = time.monotonic() + deadline_seconds
        tries, sleep_seconds = 0, _FIRST_SLEEP_SECONDS
        while (answer := ready()) is None or answer is False:
            tries += 1
            if not self.crowded:
                os.sched_yield()
            elif tries > _SPINS:
                time.sleep(sleep_seconds)
                sleep_seconds = min(1.5 * sleep_seconds, _LONGEST_SLEEP_SECONDS)
            if time.monotonic() > give_up:
                raise TimeoutError
        return answer
