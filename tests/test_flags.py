from __future__ import annotations

import pytest

from hvdist import UserError
from hvdist.flags import as_typed, one_sentence, run, switches_of


def test_dashes_and_bare_switches_are_what_people_type() -> None:
    typed = [
        "--max-staleness",
        "3",
        "--resume",
        "--lr-by-staleness=false",
        "--out",
        "a-b",
        "--model-args.hidden",
        "[8]",
    ]
    assert as_typed([*typed, "--overwrite"], {"resume", "overwrite", "lr_by_staleness"}) == [
        "--max_staleness", "3", "--resume=true", "--lr_by_staleness=false", "--out", "a-b",
        "--model_args.hidden", "[8]", "--overwrite=true",
    ]  # fmt: skip
    assert as_typed(["--resume", "false", "--name"], {"resume"}) == ["--resume", "false", "--name"]


def write(out: str, rows: int = 3, force: bool = False, parts: list[int] = [1]) -> None:  # noqa: B006
    """Write something.

    Args:
        out: Where to.
        rows: How many.
        force: Even so.
        parts: Of it.
    """
    if rows < 0:
        raise UserError(f"rows is {rows}")
    print(out, rows, force, parts)


def test_a_function_becomes_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert switches_of(write) == {"force"}
    run(write, ["--out", "here", "--force", "--parts", "[2, 3]"])
    assert capsys.readouterr().out == "here 3 True [2, 3]\n"
    with pytest.raises(SystemExit):
        run(write, ["--help"])
    helped = capsys.readouterr().out
    assert "Write something." in helped
    assert "How many." in helped


def test_a_mistake_is_one_sentence_and_a_fault_keeps_its_traceback() -> None:
    with pytest.raises(SystemExit) as ended:
        run(write, ["--out", "here", "--rows", "-1"])
    assert str(ended.value.code).endswith(": rows is -1")
    with pytest.raises(ZeroDivisionError), one_sentence():
        _ = 1 / 0


def test_only_the_first_rank_complains(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    for rank, told in (("0", True), ("3", False)):
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
        with pytest.raises(SystemExit) as ended:
            run(write, ["--outt", "here"])
        assert ended.value.code == 2
        assert bool(capsys.readouterr().err) == told
        with pytest.raises(SystemExit) as ended:
            run(write, ["--out", "here", "--rows", "-1"])
        assert (ended.value.code != 1) == told
