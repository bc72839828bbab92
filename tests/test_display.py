from __future__ import annotations

import pytest

from hvdist.display import Display


def test_without_a_terminal_progress_is_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hvdist.display.writes_to_terminal", lambda: False)
    display = Display("sync", every_seconds=0.0)
    assert display.due
    display.show(0.5, "epoch 1.00")
    display.say("sync epoch 1.00: test error 0.5")
    display.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("sync  50 % | epoch 1.00 | ")
    assert lines[1] == "sync epoch 1.00: test error 0.5"
    assert not Display("sync", every_seconds=100.0).due


def test_on_a_terminal_progress_is_one_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hvdist.display.writes_to_terminal", lambda: True)
    display = Display("sync", every_seconds=100.0)
    for fraction in (0.25, 0.5, 1.0):
        display.show(fraction, f"at {fraction}")
    display.say("a line")
    display.close()
    written = capsys.readouterr().err
    assert "a line\n" in written
    assert "100%" in written
    assert "at 1.0" in written
