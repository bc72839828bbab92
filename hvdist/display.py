"""Progress for people: a bar where one watches a terminal, else a line now and then, flushed. The leader's alone."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

from hvdist.launch import writes_to_terminal


class Display:
    """Shows how far a run is.

    Args:
        title: of the run.
        every_seconds: between two lines; the bar looks after itself.
    """

    def __init__(self, title: str, every_seconds: float) -> None:
        self._title, self._every = title, every_seconds
        self._next = time.monotonic() + every_seconds
        self._began = time.monotonic()
        layout = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
        self._bar = tqdm(total=1.0, desc=title, bar_format=layout, file=sys.stderr) if writes_to_terminal() else None

    @property
    def due(self) -> bool:
        """Whether it is time for `show`; asked at every update, so it must cost nothing."""
        return time.monotonic() >= self._next

    def show(self, fraction: float, text: str) -> None:
        """The run is at `fraction` (0 to 1)."""
        self._next = time.monotonic() + (1.0 if self._bar is not None else self._every)
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(fraction - self._bar.n)
            return
        left = (time.monotonic() - self._began) * (1 - fraction) / max(fraction, 1e-9)
        print(f"{self._title} {100 * fraction:3.0f} % | {text} | {left:.0f} s left", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the terminal tidy."""
        if self._bar is not None:
            self._bar.close()
