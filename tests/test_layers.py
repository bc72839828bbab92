"""The project keeps its own rules: layers, documentation, packages in one place."""

from __future__ import annotations

import ast
import configparser
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

import hvdist

MODULES = sorted(path for path in (ROOT / "hvdist").rglob("*.py"))


def test_layers_are_kept() -> None:
    lint = Path(sys.executable).parent / "lint-imports"
    if not lint.exists():
        pytest.skip("import-linter is not installed")
    done = subprocess.run([lint, "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_importing_hvdist_needs_neither_mpi_nor_horovod() -> None:
    code = "import hvdist, hvdist.__main__, sys; assert not {'mpi4py', 'horovod'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_every_public_name_is_there_and_documented() -> None:
    for name in hvdist.__all__:
        assert getattr(hvdist, name) is hvdist.ALGORITHMS or getattr(hvdist, name).__doc__, name


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_hold_one_idea_and_say_it(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), "no docstring"
    assert len(text.splitlines()) <= 400


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_errors_are_raised_and_pickle_is_not_used(path: Path) -> None:
    tree = ast.parse(path.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not names & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    if path.parent.name != "bench":  # benches time the rivals' pickle
        lower_case = {"send", "recv", "bcast", "gather", "allgather", "allreduce", "scatter", "isend", "irecv"}
        on_mpi = {"world", "peers", "node", "_world", "_peers", "_exit", "COMM_WORLD"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in lower_case:
                owner = node.func.value
                name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                assert name not in on_mpi, f"{name}.{node.func.attr} pickles"


def test_every_algorithm_documents_its_roles_and_messages() -> None:
    for name, kind in hvdist.ALGORITHMS.items():
        told = importlib.import_module(kind.__module__).__doc__ or ""
        assert "Source:" in told, name
        assert "| role | ranks | what it does |" in told, name
        for seat in kind().seats:
            assert f"| {seat.role} |" in told, name
            assert getattr(kind, seat.role).__doc__, name


def test_doctests_hold() -> None:
    import doctest

    tried = 0
    for module in pkgutil.walk_packages(hvdist.__path__, "hvdist."):
        if module.name.startswith(("hvdist.comm", "hvdist.trainer", "hvdist.bench", "hvdist.__main__")):
            continue  # these start MPI when imported, or have none
        result = doctest.testmod(importlib.import_module(module.name))
        assert result.failed == 0, module.name
        tried += result.attempted
    assert tried >= 5


def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def requirements(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")}


def test_conda_and_pip_ask_for_the_same_packages() -> None:
    config = setup_cfg()
    extras = config["options.extras_require"]
    wanted = requirements(config["options"]["install_requires"])
    for name in ("tensorboard", "report", "data"):
        wanted |= requirements(extras[name])
    environment = yaml.safe_load((ROOT / "env.yml").read_text())["dependencies"]
    conda = {line for line in environment if isinstance(line, str)}
    (pip,) = (line["pip"] for line in environment if isinstance(line, dict))
    own = {"python" + config["options"]["python_requires"], "openmpi", "cxx-compiler", "pip", "setuptools>=64"}
    assert own <= conda
    assert (conda - own) | set(pip) == wanted
    assert not (conda & set(pip))


def test_setup_builds_what_setup_cfg_asks_for() -> None:
    script = (ROOT / "jobs" / "setup.sh").read_text()
    config = setup_cfg()
    assert "torch==" in config["options"]["install_requires"]
    assert requirements(config["options.extras_require"]["horovod"]) == {"horovod==0.28.1"}
    assert not re.search(r"torch==\d|horovod==\d", script), "versions stand in setup.cfg alone"


def test_the_top_level_is_the_agreed_one() -> None:
    listed = subprocess.run(
        ["git", "ls-tree", "--name-only", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    visible = {name for name in listed.stdout.split() if not name.startswith(".")}
    assert visible <= {
        "setup.cfg", "pyproject.toml", "hvdist", "jobs", "data_prep", "tests", "env.yml", "README.md", "LICENSE",
        "CHANGELOG.md",
    }  # fmt: skip
