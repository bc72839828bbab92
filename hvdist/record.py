"""The run's diary, `record.jsonl`: one JSON object a line, each with `event`, `seconds`, `update` and `samples`."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class Clock:
    """Training seconds: what passes while it runs. It stands still until it is started.

    Args:
        now: seconds on any clock.
        seconds: to go on from.
    """

    def __init__(self, now: Callable[[], float], seconds: float = 0.0) -> None:
        self._now = now
        self._counted = seconds
        self._started: float | None = None

    @property
    def seconds(self) -> float:
        """Counted so far."""
        return self._counted + (self._now() - self._started if self._started is not None else 0.0)

    def start(self) -> None:
        """Count from now on."""
        self._started = self._now()

    def stop(self) -> None:
        """Stand still from now on."""
        self._counted, self._started = self.seconds, None

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Stand still meanwhile."""
        self.stop()
        yield
        self.start()


class Record:
    """Appends events to a file; each line is on its way to the disk before the next is made.

    Args:
        path: of the file.
        keep_seconds: of an earlier part of the run, keep the events up to here; None: start anew.
    """

    def __init__(self, path: Path, keep_seconds: float | None = None) -> None:
        kept = []
        if keep_seconds is not None and path.exists():
            kept = [event for event in read_record(path) if event["seconds"] <= keep_seconds]
        write_text(path, "".join(_line(event) for event in kept))
        self._file = path.open("a", buffering=1)

    def write(self, event: str, seconds: float, update: int, samples: int, **fields: Any) -> None:
        """One event."""
        self._file.write(_line({"event": event, "seconds": seconds, "update": update, "samples": samples, **fields}))

    def close(self) -> None:
        """No more events."""
        self._file.close()


def read_record(path: Path) -> list[dict[str, Any]]:
    """All events; a last line that was cut off by a crash is left out."""
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_json(path: Path, fields: dict[str, Any]) -> None:
    """Write a JSON file whole or not at all; NaN and infinity, which JSON has not, become null."""
    write_text(path, json.dumps(_finite(fields), indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _line(event: dict[str, Any]) -> str:
    return json.dumps(_finite(event)) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
