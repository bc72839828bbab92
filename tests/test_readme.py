"""What README shows is run: its script with both algorithms, and its two training commands."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT

from hvdist.launch import mpiexec
from hvdist.prepare import Table, write_folders

README = (ROOT / "README.md").read_text()
SCRIPT = README.split("```python\n")[1].split("```")[0]
COMMANDS = [line.strip() for line in README.splitlines() if line.startswith("    mpirun -n 4 hvdist train")]
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


def test_every_path_and_command_exists() -> None:
    for path in set(re.findall(r"\b(?:jobs|tests|data_prep|hvdist)/[\w./-]+\w", README)):
        assert (ROOT / path).exists(), path
    commands = set(re.findall(r"^    (?:mpirun -n \d+ )?(?:hvdist|python -m hvdist) (\w+)", README, re.MULTILINE))
    assert commands == {"train", "report", "info", "bench"}


@pytest.mark.parametrize("algorithm", ["Sync()", "ASGD(ahead=1)", "DCASGD(strength=2.0, adaptive=True)"])
def test_the_script_runs_with_any_algorithm_in_its_one_line(algorithm: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    y = generator.integers(0, 10, 512)
    x = generator.integers(0, 60, (512, 1, 28, 28), dtype=np.uint8)
    x[np.arange(512), 0, y] = 255  # the class is the bright row
    write_folders(tmp_path / "shards" / "fashion-mnist", {"train": Table(x, y)}, "bright rows")
    script, changed = re.subn(r"^algorithm = .*$", f"algorithm = hvdist.{algorithm}", SCRIPT, flags=re.MULTILINE)
    assert changed == 1
    (tmp_path / "script.py").write_text(script)
    command, environment = mpiexec(4)
    done = subprocess.run(
        [*command, sys.executable, "script.py"], cwd=tmp_path, env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ("does not train: steps() plays its role to the end" in done.stderr) == (algorithm != "Sync()")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )
    model.load_state_dict(state)
    error = (model(torch.from_numpy(x) / 255).argmax(1).numpy() != y).mean()
    assert error < 0.5


@pytest.mark.skipif(not FASHION_MNIST.is_dir(), reason="needs Debian's package dataset-fashion-mnist")
@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line.split()[5])
def test_the_commands_reach_the_error_they_promise(line: str, tmp_path: Path) -> None:
    data = tmp_path / "shards" / "fashion-mnist"
    subprocess.run([sys.executable, "data_prep/fashion_mnist.py", "--out", data], cwd=ROOT, check=True)
    command, environment = mpiexec(4)
    words = shlex.split(line)
    done = subprocess.run(
        [*command, sys.executable, "-m", *words[3:]], cwd=tmp_path,
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / words[words.index("--out") + 1] / "summary.json").read_text())
    assert summary["test_error"] < 0.13
    assert summary["epochs"] == pytest.approx(5, abs=0.01)


def test_both_algorithms_are_promised() -> None:
    assert [line.split()[5] for line in COMMANDS] == ["sync", "dcasgd"]
