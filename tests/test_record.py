from __future__ import annotations

import json
from pathlib import Path

from hvdist.record import Clock, Record, read_record, write_json


def test_events_are_one_json_object_a_line(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.jsonl")
    record.write("eval", 1.5, 3, 192, test_error=0.25, train_loss=float("nan"), by={"a": float("inf"), "b": [1.0]})
    lines = (tmp_path / "record.jsonl").read_text().splitlines()  # written already: nothing waits in a buffer
    record.close()
    assert [json.loads(line) for line in lines] == [
        {
            "event": "eval", "seconds": 1.5, "update": 3, "samples": 192,
            "test_error": 0.25, "train_loss": None, "by": {"a": None, "b": [1.0]},
        }
    ]  # fmt: skip


def test_a_new_run_starts_a_new_record_and_a_resumed_one_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    first = Record(path)
    for seconds in (1.0, 2.0, 3.0):
        first.write("progress", seconds, 1, 1)
    first.close()
    path.write_text(path.read_text() + '{"event": "progress", "sec')  # the process died here
    resumed = Record(path, keep_seconds=2.0)
    resumed.write("resume", 2.0, 1, 1)
    resumed.close()
    assert [(event["event"], event["seconds"]) for event in read_record(path)] == [
        ("progress", 1.0), ("progress", 2.0), ("resume", 2.0),
    ]  # fmt: skip
    Record(path).close()
    assert path.read_text() == ""


def test_json_files_are_whole(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": float("nan"), "y": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": None, "y": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_the_clock_stands_still_in_a_pause() -> None:
    now = 10.0
    clock = Clock(lambda: now, seconds=5.0)
    now = 20.0
    assert clock.seconds == 5.0  # not started
    clock.start()
    now = 23.0
    assert clock.seconds == 8.0
    with clock.pause():
        now = 100.0
        assert clock.seconds == 8.0
    now = 101.0
    assert clock.seconds == 9.0
    clock.stop()
    now = 200.0
    assert clock.seconds == 9.0
