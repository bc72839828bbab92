from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvdist import UserError
from hvdist.record import Record, write_json
from hvdist.report import report, text_table


def run_folder(path: Path, error: float) -> Path:
    path.mkdir()
    summary = {
        "algorithm": "dcasgd", "roles": {"server": 1, "worker": 3}, "test_error": error, "epochs": 2.0, "samples": 200,
        "seconds": 1.25, "samples_per_second": 160.0,
        "staleness_mean": 1.5, "staleness_max": 4, "bytes_sent": 3_000_000,
    }  # fmt: skip
    write_json(path / "summary.json", summary)
    record = Record(path / "record.jsonl")
    for epoch in range(3):
        record.write("eval", 0.5 * epoch, epoch, 100 * epoch, test_error=error / (epoch + 1))
    record.close()
    return path


def test_runs_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report([str(run_folder(tmp_path / "one", 0.25)), str(run_folder(tmp_path / "two", float("nan")))])
    head, one, two = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "run", "algorithm", "ranks", "test", "error", "epochs", "seconds", "samples/s", "staleness", "sent",
    ]  # fmt: skip
    assert re.split(r"\s{2,}", one.strip()) == [
        "one", "dcasgd", "1 server + 3 worker", "0.2500", "2.00", "1.2", "160", "1.50 (max 4)", "3 MB",
    ]  # fmt: skip
    assert "not finite" in two


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "report.html"
    report([str(run_folder(tmp_path / "a&b", 0.25))], str(out))
    page = out.read_text()
    assert "a&amp;b" in page
    assert "data:image/png;base64,iVBOR" in page
    assert "http" not in page


def test_a_folder_without_a_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no summary.json: no run, or one that has not ended"):
        report([str(tmp_path)])


def test_columns_are_aligned() -> None:
    table = text_table([{"a": "1", "long name": "2"}, {"a": "333", "long name": "4"}])
    assert [line.rstrip() for line in table.splitlines()] == ["a    long name", "1    2", "333  4"]
