"""The commands that need no training: help, info, bench."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from conftest import ROOT, run

from hvdist import ALGORITHMS
from hvdist.bench import BENCHES
from hvdist.launch import mpiexec


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["train"],
        ["report"],
        ["info"],
        ["bench"],
        *(["train", name] for name in ALGORITHMS),
        *(["bench", n] for n in BENCHES),
    ],
    ids=" ".join,
)
def test_help_teaches_without_mpi(words: list[str]) -> None:
    code = (
        "import sys, hvdist.__main__ as m\n"
        "try: m.main(sys.argv[1:])\n"
        "except SystemExit as ended: assert not ended.code\n"
        "assert 'mpi4py' not in sys.modules"
    )
    done = run("-c", code, *words, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
    if words[:1] == ["train"] and len(words) == 2:
        assert "--data DATA" in done.stdout
        assert "| role | ranks | what it does |" in done.stdout
        assert f"mpirun -n 4 hvdist train {words[1]}" in done.stdout
        undocumented = re.findall(r"^  (--\w+) \S+\s+\(", done.stdout, re.MULTILINE)
        assert not undocumented


def test_the_command_and_the_module_are_the_same() -> None:
    assert run("-m", "hvdist", "--help").stdout.replace("__main__.py", "hvdist").startswith("usage: hvdist")


def test_info_tells_what_is_here() -> None:
    done = run("-m", "hvdist", "info")
    assert done.returncode == 0, done.stderr
    for name in ("python", "torch", "mpi4py", "MPI", "thread level", "horovod", "Horovod", "mpirun"):
        assert name in done.stdout


def test_info_under_mpirun_tells_who_is_where() -> None:
    command, environment = mpiexec(3)
    done = subprocess.run(
        [*command, sys.executable, "-m", "hvdist", "info", "--algorithm", "dcasgd"], cwd=ROOT, env=environment,
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    lines = [line.split() for line in done.stdout.splitlines()]
    roles = [line[2] for line in lines if len(line) == 3 and line[0].isdigit()]
    assert roles == ["server", "worker", "worker"]


@pytest.mark.parametrize(
    ("breaks", "problem"),
    [
        ("sys.modules['mpi4py.MPI'] = None", "mpi4py cannot load MPI"),
        ("os.environ['SLURM_NTASKS'] = '4'", "Slurm counts 4 processes"),
        ("importlib.util.find_spec = lambda name: None", "Horovod is not installed"),
        ("import hvdist.info; hvdist.info.has_compiler = lambda: False", "no C++ compiler"),
    ],
)
def test_info_names_each_problem_with_its_cure(breaks: str, problem: str) -> None:
    done = run("-c", f"import importlib.util, os, sys; {breaks}; import hvdist.__main__ as m; m.main(['info'])")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"- {problem}")]
    assert re.search("install|setup.sh|srun", line), line


def test_an_unknown_algorithm_is_said_with_those_there_are() -> None:
    done = run("-m", "hvdist", "info", "--algorithm", "fedavg")
    assert done.returncode == 1
    assert "no algorithm 'fedavg'; there are sync, asgd, dcasgd" in done.stderr
    assert "sync" in run("-m", "hvdist", "train", "fedavg").stderr


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (
            ["update", "--parameters", "300000"],
            ["constant, floor", "constant, naive", "constant, chunked", "adaptive, chunked"],
        ),
        (["pushpull", "--parameters", "10000"], ["mpi4py buffers", "hvdist, lent", "gloo", "torch.distributed.rpc"]),
        (
            ["mean", "--elements", "1000"],
            ["mpi4py Allreduce", "hvdist comm.mean", "hvd.DistributedOptimizer", "hvdist sync"],
        ),
    ],
    ids=lambda value: value[0],
)
def test_benches_run_and_print_ratios(words: list[str], names: list[str]) -> None:
    if words[0] == "mean":
        pytest.importorskip("horovod")
    done = run("-m", "hvdist", "bench", *words, "--rounds", "3", timeout=200)
    assert done.returncode == 0, done.stderr
    for name in names:
        assert re.search(rf"{re.escape(name)}.* ms +\d+\.\d\d x", done.stdout), f"{name}\n{done.stdout}"
    assert "bar" in done.stdout
