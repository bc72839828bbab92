"""What goes wrong for people: each ends the whole job, soon, non-zero, with one clear message; or is survived."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import ROOT
from tables import small_table

from hvdist.launch import mpiexec
from hvdist.prepare import Table, write_folders

# Far more than any of these takes; a hang is what it is for.
HANG_SECONDS = 60


def launch(ranks: int, *words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run this Python with these words on so many ranks."""
    command, clean = mpiexec(ranks)
    return subprocess.run(
        [*command, sys.executable, *map(str, words)], cwd=ROOT, env={**clean, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip


def train(ranks: int, algorithm: str, data: Path, out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    wide = ["--model_args.hidden", "[8]", "--batch", "8", "--epochs", "2"]
    return launch(ranks, "-m", "hvdist", "train", algorithm, "--data", data, "--out", out, *wide, *flags)


def assert_ends_with_one(done: subprocess.CompletedProcess[str], message: str) -> None:
    told = done.stdout + done.stderr
    assert done.returncode != 0, told
    assert told.count(message) == 1, told


def script(tmp_path: Path, data: Path, body: str, algorithm: str = "ASGD()", top: str = "") -> Path:
    """A training script like README's, with something wrong in its loop."""
    path = tmp_path / "script.py"
    text = f"""
    import os, signal, sys, time
    import torch
    import hvdist
    {top}
    algorithm = hvdist.{algorithm}
    comm = hvdist.init(algorithm)
    shards = hvdist.Shards({str(data / "train")!r}, comm)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 3))
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    optimizer = hvdist.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, loss, algorithm, comm)
    step = 0
    for x, y, weight in optimizer.steps(shards, batch=8, epochs=200):
        step += 1
        {body}
        optimizer.zero_grad()
        (weight * loss(model(x), y)).mean().backward()
        optimizer.step()
    comm.close()
    print("closed", comm.rank)
    """
    path.write_text(textwrap.dedent(text))
    return path


def test_no_data(tmp_path: Path) -> None:
    done = train(2, "dcasgd", Path("nowhere"), tmp_path / "out")
    assert_ends_with_one(done, "no shard folder nowhere/train; make one with a script of data_prep/")
    assert "Traceback" not in done.stderr
    assert "[rank 0 server @" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_run_to_be_replaced_stays_until_the_new_one_is_sure_to_begin(data: Path, tmp_path: Path) -> None:
    assert train(1, "sync", data, tmp_path / "out").returncode == 0
    assert train(1, "sync", Path("nowhere"), tmp_path / "out", "--overwrite").returncode != 0
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["samples"] == 192
    assert (tmp_path / "out" / "checkpoint").is_dir()


def test_an_unknown_flag(data: Path, tmp_path: Path) -> None:
    done = train(2, "dcasgd", data, tmp_path / "out", "--max-stalness", "3")
    assert_ends_with_one(done, "unrecognized arguments: --max_stalness 3")


def test_a_value_that_makes_no_sense(data: Path, tmp_path: Path) -> None:
    assert_ends_with_one(train(2, "dcasgd", data, tmp_path / "out", "--batch", "0"), "batch must be above 0, got 0")
    assert_ends_with_one(train(2, "dcasgd", data, tmp_path / "out", "--optimizer", "SDG"), "torch.optim has no 'SDG'")


@pytest.mark.parametrize(("ranks", "flags"), [(1, []), (2, ["--servers", "2"])])
def test_too_few_ranks(ranks: int, flags: list[str], data: Path, tmp_path: Path) -> None:
    done = train(ranks, "dcasgd", data, tmp_path / "out", *flags)
    assert_ends_with_one(done, f"cannot hold the roles: server {ranks}, worker >= 1; start at least {ranks + 1}")


def test_a_truncated_shard(data: Path, tmp_path: Path) -> None:
    broken = tmp_path / "data"
    shutil.copytree(data, broken)
    shard = broken / "train" / "shard-00001-of-00003.h5"
    os.truncate(shard, shard.stat().st_size - 100)
    done = train(3, "dcasgd", broken, tmp_path / "out")
    assert_ends_with_one(done, "shard-00001-of-00003.h5 is")
    assert "truncated or replaced" in done.stderr


@pytest.mark.parametrize("algorithm", ["ASGD()", "DCASGD(servers=2)", "Sync()"])
def test_a_rank_that_raises(algorithm: str, data: Path, tmp_path: Path) -> None:
    body = "if step == 3 and comm.rank == 2: raise ZeroDivisionError('at step 3')"
    done = launch(4, script(tmp_path, data, body, algorithm))
    assert_ends_with_one(done, "ZeroDivisionError: at step 3")
    role = "learner" if algorithm == "Sync()" else "worker"
    assert f"[rank 2 {role} @{os.uname().nodename}] Traceback" in done.stderr


def test_a_thread_that_raises(data: Path, tmp_path: Path) -> None:
    body = "if step == 3 and comm.rank == 1: threading.Thread(target=lambda: 1 / 0).start(); time.sleep(30)"
    done = launch(3, script(tmp_path, data, body, top="import threading"))
    assert_ends_with_one(done, "ZeroDivisionError")


@pytest.mark.parametrize("leave", ["sys.exit(0)", "sys.exit(3)"])
def test_a_learner_that_leaves_without_a_word(leave: str, data: Path, tmp_path: Path) -> None:
    done = launch(3, script(tmp_path, data, f"if step == 3 and comm.rank == 2: {leave}", "Sync()"))
    assert done.returncode != 0
    assert done.stdout.count("closed") == 0


def test_a_rank_that_leaves_before_its_role_begins(data: Path, tmp_path: Path) -> None:
    path = script(tmp_path, data, "pass")
    path.write_text(path.read_text().replace("step = 0", "step = 0\nif comm.rank == 2: sys.exit(0)"))
    done = launch(3, path)
    assert_ends_with_one(done, "this rank left without comm.close() while others still wait for it")
    assert "[rank 2 worker @" in done.stderr


def test_a_worker_that_leaves_without_a_word_is_let_go(data: Path, tmp_path: Path) -> None:
    path = script(tmp_path, data, "if step == 3 and comm.rank == 2: sys.exit(0)")
    path.write_text(path.read_text().replace("epochs=200", "epochs=5"))
    done = launch(3, path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("closed") == 2


@pytest.mark.parametrize("end", ["os._exit(1)", "os.kill(os.getpid(), signal.SIGKILL)", "os.kill(os.getpid(), 11)"])
def test_a_rank_that_dies(end: str, data: Path, tmp_path: Path) -> None:
    done = launch(3, script(tmp_path, data, f"if step == 3 and comm.rank == 2: {end}"))
    assert done.returncode != 0
    assert "closed" not in done.stdout


def test_a_script_that_forgets_to_close_ends_well(data: Path, tmp_path: Path) -> None:
    path = script(tmp_path, data, "pass")
    path.write_text(path.read_text().replace("comm.close()", "").replace("epochs=200", "epochs=2"))
    done = launch(3, path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("closed") == 3


@pytest.mark.parametrize("wide", [3, 200_000])  # the wide model's gradients go through Horovod, where there is one
def test_one_rank_that_leaves_a_collective_loop_early(wide: int, data: Path, tmp_path: Path) -> None:
    path = script(tmp_path, data, "if step == 3 and comm.rank == 2: break", "Sync()")
    path.write_text(path.read_text().replace("Linear(6, 3)", f"Linear(6, {wide}), torch.nn.Linear({wide}, 3)"))
    done = launch(3, path)
    assert done.returncode != 0
    assert done.stdout.count("closed") == 0
    if wide == 3:
        assert_ends_with_one(done, "another rank of this role has left while this one still averages")


def test_one_worker_that_leaves_its_loop_early_is_let_go(data: Path, tmp_path: Path) -> None:
    path = script(tmp_path, data, "if step == 3 and comm.rank == 2: break")
    path.write_text(path.read_text().replace("epochs=200", "epochs=5"))
    done = launch(3, path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("closed") == 3


@pytest.mark.parametrize("algorithm", ["sync", "dcasgd"])
def test_nothing_but_nan_ends_the_run(algorithm: str, tmp_path: Path) -> None:
    table = small_table(96)
    table.x[:] = float("nan")
    write_folders(tmp_path / "data", {"train": table, "test": small_table(30)}, "NaN")
    done = train(2, algorithm, tmp_path / "data", tmp_path / "out", "--epochs", "1000")
    assert_ends_with_one(done, "of the last 100 gradients were not finite")


def test_divergence_ends_the_run(data: Path, tmp_path: Path) -> None:
    done = train(3, "dcasgd", data, tmp_path / "out", "--lr", "1e30", "--epochs", "1000")
    assert_ends_with_one(done, "the run has diverged or the data are bad")


@pytest.mark.parametrize(
    ("variable", "launcher"),
    [("SLURM_NTASKS", "Slurm"), ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"), ("PMI_SIZE", "a PMI launcher")],
)
def test_ranks_that_do_not_see_each_other(variable: str, launcher: str, data: Path, tmp_path: Path) -> None:
    """srun without PMI starts N worlds of one; each would write the same run."""
    _, clean = mpiexec(1)
    words = ["-m", "hvdist", "train", "sync", "--data", str(data), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env={**clean, variable: "4"},
        capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert_ends_with_one(done, f"{launcher} counts 4 processes ({variable}=4) but MPI sees each of them alone")
    assert "srun --mpi=pmix" in done.stderr
    assert not (tmp_path / "out").exists()


def test_one_rank_needs_no_launcher(data: Path, tmp_path: Path) -> None:
    _, clean = mpiexec(1)
    words = ["-m", "hvdist", "train", "sync", "--data", str(data), "--out", str(tmp_path / "out"), "--epochs", "2"]
    subprocess.run([sys.executable, *words], cwd=ROOT, env=clean, capture_output=True, timeout=HANG_SECONDS, check=True)
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["samples"] == 192


def test_ranks_that_run_different_algorithms(data: Path, tmp_path: Path) -> None:
    path = script(tmp_path, data, "pass", "ASGD(drift_every=1 + int(os.environ['OMPI_COMM_WORLD_RANK']) // 2)")
    done = launch(3, path)
    assert_ends_with_one(done, "the algorithm differs from the leader's (rank 0)")
    assert "[rank 2 worker @" in done.stderr


def test_a_run_goes_on_with_another_number_of_ranks(data: Path, tmp_path: Path) -> None:
    for ranks, epochs in ((3, "0.5"), (2, "3")):
        done = train(ranks, "sync", data, tmp_path / "out", "--resume", "--epochs", epochs)
        assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["samples"], summary["ranks"]) == (3 * 96, 2)


def test_a_checkpoint_of_other_servers_is_refused(data: Path, tmp_path: Path) -> None:
    assert train(3, "asgd", data, tmp_path / "out").returncode == 0
    done = train(3, "asgd", data, tmp_path / "out", "--servers", "2", "--resume", "--epochs", "4")
    assert_ends_with_one(done, "was saved by 1 ranks; resume with as many servers")
    assert "servers: 1" in (tmp_path / "out" / "config.yaml").read_text()  # what was refused left no trace


def test_a_config_repeats_the_run(data: Path, tmp_path: Path) -> None:
    assert train(2, "sync", data, tmp_path / "one", "--lr", "0.03", "--schedule", "cosine").returncode == 0
    config = tmp_path / "one" / "config.yaml"
    again = launch(2, "-m", "hvdist", "train", "sync", "--config", config, "--out", tmp_path / "two")
    assert again.returncode == 0, again.stderr
    first, second = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("one", "two"))
    assert first["train_loss"] == second["train_loss"]
    differing = set(config.read_text().splitlines()) ^ set((tmp_path / "two" / "config.yaml").read_text().splitlines())
    assert len(differing) == 4  # out, and the comment that names it
    wrong = launch(3, "-m", "hvdist", "train", "dcasgd", "--config", config, "--out", tmp_path / "three")
    assert wrong.returncode == 0, wrong.stderr  # settings of training fit every algorithm


def test_labels_beyond_the_classes_end_the_job(tmp_path: Path) -> None:
    table = small_table(96)
    write_folders(tmp_path / "data", {"train": table, "test": Table(table.x, table.y + 5)}, "labels")
    done = train(2, "sync", tmp_path / "data", tmp_path / "out")
    assert done.returncode != 0
    assert "[rank 0 learner @" in done.stderr
