"""Starts tests/mpi under mpiexec: one launch for each world size."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import ROOT

from hvdist.launch import mpiexec

SIZES = [1, 2, 3, 5]
LIMIT_SECONDS = 900


@pytest.mark.timeout(LIMIT_SECONDS + 30)
@pytest.mark.parametrize("ranks", SIZES)
def test_everything_in_tests_mpi(ranks: int) -> None:
    command, environment = mpiexec(ranks)
    command += [sys.executable, "-m", "mpi4py", "-m", "pytest", "-p", "pytest_mpi.plugin", "-m", "parallel[match]"]
    done = subprocess.run(
        [*command, "tests/mpi"], cwd=ROOT, env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    assert " passed" in done.stdout, done.stdout
