"""Tests under mpiexec: every rank runs every test, one verdict for all, and a hang ends with the stacks.

Started by tests/test_under_mpiexec.py, or by hand:

    mpiexec -n 3 python -m mpi4py -m pytest -p pytest_mpi.plugin -m 'parallel[match]' tests/mpi
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).parent.parent))  # tables.py is the single-process tests' too

from tables import small_table

from hvdist.prepare import Packing, write_folders

WORLD = MPI.COMM_WORLD.Dup()
TEST_SECONDS = 120


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Rank 0 speaks for all."""
    if WORLD.rank and (reporter := config.pluginmanager.getplugin("terminalreporter")):
        reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """A test fails everywhere if it fails anywhere, with the guilty ranks' words."""
    report = yield
    words = WORLD.allgather(str(report.longrepr) if report.failed else "")
    if any(words):
        report.outcome = "failed"
        report.longrepr = "\n".join(f"[rank {rank}]\n{said}" for rank, said in enumerate(words) if said)
    return report


@pytest.fixture(autouse=True)
def _watched() -> Iterator[None]:
    """A rank that waits for ever shows where, and ends the job."""
    torch.manual_seed(0)
    faulthandler.dump_traceback_later(TEST_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def shared_path() -> Iterator[Path]:
    """One empty folder for all ranks."""
    folder = WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None)
    yield Path(folder)
    WORLD.Barrier()
    if WORLD.rank == 0:
        shutil.rmtree(folder)


@pytest.fixture
def data(shared_path: Path) -> Path:
    """96 training rows in 3 shards, 30 test rows."""
    tables = {"train": small_table(96), "test": small_table(30, seed=1)}
    if WORLD.rank == 0:
        write_folders(shared_path / "data", tables, "small", Packing(shards=3))
    WORLD.Barrier()
    return shared_path / "data"
