"""The folder of a run: the names inside, and who may write there.

`config.yaml` repeats the run, `record.jsonl` is its diary, `summary.json` its end, `checkpoint/` what it goes on from.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hvdist.errors import UserError
from hvdist.record import write_text

CONFIG, RECORD, SUMMARY = "config.yaml", "record.jsonl", "summary.json"
CHECKPOINT, TENSORBOARD = "checkpoint", "tensorboard"


def check(out: Path, algorithm: str, resume: bool, overwrite: bool) -> None:
    """Make sure that a run may be kept in `out`; nothing is changed yet.

    Raises:
        UserError: `out` holds a run that is neither to be replaced nor to be gone on with, or another algorithm's.
    """
    if overwrite or not (out / CONFIG).exists():
        return
    if not resume:
        raise UserError(
            f"{out} holds a run; give --resume to go on with it, --overwrite to replace it, or another --out"
        )
    if (found := _algorithm_of(out)) != algorithm:
        raise UserError(f"{out} holds a run of {found}, not of {algorithm}; resume it with hvdist train {found}")


def clear(out: Path) -> None:
    """Remove the run that `out` holds, and nothing else."""
    for name in (CONFIG, RECORD, SUMMARY):
        (out / name).unlink(missing_ok=True)
    for name in (CHECKPOINT, TENSORBOARD):
        shutil.rmtree(out / name, ignore_errors=True)


def write_config(out: Path, algorithm: str, settings: Mapping[str, Any]) -> None:
    """Write the effective settings, so that `--config` repeats the run."""
    out.mkdir(parents=True, exist_ok=True)
    command = f"# hvdist train {algorithm} --config {out / CONFIG}\n"
    write_text(out / CONFIG, command + yaml.safe_dump(dict(settings), sort_keys=False))


def _algorithm_of(out: Path) -> str:
    """The first line of the settings names it."""
    return (out / CONFIG).read_text().splitlines()[0].removeprefix("# hvdist train ").split()[0]
