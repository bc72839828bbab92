"""`hvdist report`: run folders side by side, as a table, and as one page that needs nothing else."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdist.errors import UserError
from hvdist.record import read_record
from hvdist.run_folder import RECORD, SUMMARY

Row = dict[str, str]


def report(runs: list[str], out: str | None = None) -> None:
    """Show finished runs side by side.

    Args:
        runs: Run folders.
        out: Also write one self-contained HTML page with the table and plots.
    """
    folders = [Path(run) for run in runs]
    rows = [_row(folder, _summary(folder)) for folder in folders]
    print(text_table(rows))
    if out:
        Path(out).write_text(_page(folders, rows))
        print(f"\n{out}: the table with plots of error over epochs and over seconds")


def text_table(rows: Sequence[Row]) -> str:
    """Rows of the same columns, aligned."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _summary(folder: Path) -> dict[str, Any]:
    path = folder / SUMMARY
    if not path.is_file():
        raise UserError(f"{folder} has no {SUMMARY}: no run, or one that has not ended; give folders of --out")
    summary: dict[str, Any] = json.loads(path.read_text())
    return summary


def _row(folder: Path, summary: dict[str, Any]) -> Row:
    return {
        "run": folder.name,
        "algorithm": summary["algorithm"],
        "ranks": " + ".join(f"{count} {role}" for role, count in summary["roles"].items()),
        "test error": _number(summary["test_error"], "{:.4f}"),
        "epochs": f"{summary['epochs']:.2f}",
        "seconds": f"{summary['seconds']:.1f}",
        "samples/s": f"{summary['samples_per_second']:,.0f}",
        "staleness": f"{summary['staleness_mean']:.2f} (max {summary['staleness_max']:.0f})",
        "sent": f"{summary['bytes_sent'] / 1e6:,.0f} MB",
    }


def _number(value: float | None, layout: str) -> str:
    return "not finite" if value is None else layout.format(value)


def _page(folders: Sequence[Path], rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row.values()) + "</tr>\n" for row in rows
    )
    return (
        '<!doctype html><meta charset="utf-8"><title>hvdist runs</title>\n'
        "<style>body{font:15px sans-serif;margin:2em}td,th{padding:.3em 1em;text-align:left}"
        "tr:nth-child(odd){background:#f3f3f3}img{max-width:100%}</style>\n"
        f"<h1>hvdist runs</h1>\n<table><tr>{head}</tr>\n{body}</table>\n{_plots(folders)}\n"
    )


def _plots(folders: Sequence[Path]) -> str:
    """Test error over epochs and over training seconds, as inlined PNG."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("plots need matplotlib: pip install 'hvdist[report]'") from error
    figure = Figure(figsize=(11, 4), layout="constrained")
    by_epochs, by_seconds = figure.subplots(1, 2, sharey=True)
    for folder in folders:
        rows = _summary(folder)["samples"] / max(_summary(folder)["epochs"], 1e-9)
        evals = [event for event in read_record(folder / RECORD) if event["event"] == "eval"]
        errors = [event["test_error"] for event in evals]
        by_epochs.plot([event["samples"] / rows for event in evals], errors, "o-", label=folder.name)
        by_seconds.plot([event["seconds"] for event in evals], errors, "o-", label=folder.name)
    by_epochs.set(xlabel="epochs", ylabel="test error")
    by_seconds.set(xlabel="training seconds")
    by_epochs.legend()
    for axes in (by_epochs, by_seconds):
        axes.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    return f'<img alt="test error" src="data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}">'
