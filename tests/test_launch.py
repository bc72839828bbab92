from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hvdist import UserError
from hvdist.launch import claimed_rank, claimed_size, mpiexec, refuse_singletons, writes_to_terminal

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}
SLURM_STEP = {"SLURM_NTASKS": "8", "SLURM_PROCID": "5"}


def test_each_launchers_words_are_understood() -> None:
    assert (claimed_rank({}), claimed_size({})) == (0, 1)
    assert (claimed_rank(OPEN_MPI), claimed_size(OPEN_MPI)) == (2, 4)
    assert (claimed_rank(SLURM_STEP), claimed_size(SLURM_STEP)) == (5, 8)
    assert (claimed_rank({"PMI_SIZE": "3", "PMI_RANK": "1"}), claimed_size({"PMI_SIZE": "3", "PMI_RANK": "1"})) == (
        1,
        3,
    )
    assert claimed_rank({**SLURM_STEP, **OPEN_MPI}) == 2  # mpirun inside a Slurm job
    assert claimed_rank({"SLURM_NTASKS": "8"}) == 0  # inside sbatch, before srun


def test_several_worlds_of_one_are_refused_with_the_cure() -> None:
    for environment in (OPEN_MPI, SLURM_STEP, {"SLURM_NTASKS": "8"}):
        with pytest.raises(UserError, match="MPI sees each of them alone.*srun --mpi=pmix.*unset"):
            refuse_singletons(1, environment)
        refuse_singletons(4, environment)
    refuse_singletons(1, {})
    refuse_singletons(1, {"SLURM_NTASKS": "1"})


def fake(folder: Path, name: str, body: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_open_mpi_is_told_what_it_wants_and_others_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("PMIX_RANK", "1")
    monkeypatch.setenv("MPIEXEC", str(fake(tmp_path, "ours", "echo 'mpiexec (Open MPI) 5.0.11'")))
    command, environment = mpiexec(3)
    assert command == [str(tmp_path / "ours"), "--oversubscribe", "-n", "3"]
    assert environment["OMPI_ALLOW_RUN_AS_ROOT"] == "1"
    assert "SLURM_NTASKS" not in environment
    assert "PMIX_RANK" not in environment
    monkeypatch.setenv("MPIEXEC", f"{fake(tmp_path, 'theirs', 'echo HYDRA build details')} -launcher fork")
    command, environment = mpiexec(2)
    assert command == [str(tmp_path / "theirs"), "-launcher", "fork", "-n", "2"]
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in environment


def test_no_mpiexec_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPIEXEC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(UserError, match="no mpiexec beside this Python or on PATH; load an MPI module"):
        mpiexec(2)


def test_a_file_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda descriptor: False)
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    assert not writes_to_terminal()
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    assert writes_to_terminal()


@pytest.mark.parametrize(("where", "watched"), [("/dev/pts/3", True), ("/tmp/log", False), ("pipe:[123]", False)])
def test_under_mpirun_its_own_descriptor_tells(where: str, watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda descriptor: False)
    monkeypatch.setattr(os, "readlink", lambda path: where)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert writes_to_terminal() == watched
