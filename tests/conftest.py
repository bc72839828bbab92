"""What many tests share: small shard folders, and a least-squares task whose optimum is known."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tables import small_table

from hvdist.prepare import Packing, write_folders

ROOT = Path(__file__).parent.parent

collect_ignore = ["mpi"]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 96 training rows in 3 shards and 30 test rows."""
    out = tmp_path_factory.mktemp("data") / "small"
    write_folders(out, {"train": small_table(96), "test": small_table(30, seed=1)}, "small", Packing(shards=3))
    return out


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command of this Python from the repository's root, whatever its exit status."""
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False, **options)  # type: ignore[call-overload]
