"""The ready-made loop: what it leaves behind, and that a run cut in two is the run in one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from mpi4py import MPI
from test_algorithms import ALGORITHMS, NEUTRAL, cases

import hvdist
from hvdist import ASGD, DCASGD, Schedule, Sync, Training, UserError
from hvdist.algorithm import Algorithm
from hvdist.checkpoint import latest
from hvdist.record import read_record

SIZES = [1, 2, 3, 5]


def settings(data: Path, out: Path, **changes) -> Training:
    fields = {"data": str(data), "out": str(out), "model_args": {"hidden": [8]}, "batch": 8, "epochs": 2.0}
    return Training(**fields | changes)


def final_params(out: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    folder = out / "checkpoint" / f"{latest(out / 'checkpoint'):06d}"
    return torch.cat([load_file(path)["params"] for path in sorted(folder.iterdir())])


@pytest.mark.parallel(SIZES)
@pytest.mark.parametrize("algorithm", cases(ALGORITHMS))
def test_a_run_leaves_its_folder_complete(algorithm: Algorithm, data: Path, shared_path: Path) -> None:
    out = shared_path / "run"
    summary = hvdist.train(algorithm, settings(data, out, epochs=8.0, log_every=0.0))
    MPI.COMM_WORLD.Barrier()
    assert (summary is not None) == (MPI.COMM_WORLD.rank == 0)
    told = json.loads((out / "summary.json").read_text())
    assert told["algorithm"] == algorithm.name
    assert told["ranks"] == MPI.COMM_WORLD.size == sum(told["roles"].values())
    assert told["samples"] >= 8 * 96
    assert 0 <= told["test_error"] < 0.5
    assert told["train_loss"] > 0
    assert told["seconds"] > 0
    assert {"staleness_mean", "staleness_max", "bytes_sent", "versions", "updates"} <= set(told)
    assert told["versions"]["torch"] == torch.__version__
    events = read_record(out / "record.jsonl")
    assert [event["event"] for event in events[:2]] == ["start", "eval"]
    assert events[-1]["event"] == "end"
    assert len([event for event in events if event["event"] == "eval"]) >= 9
    for event in events:
        assert {"event", "seconds", "update", "samples"} <= set(event)
    assert [event["seconds"] for event in events] == sorted(event["seconds"] for event in events)
    for event in events:
        if event["event"] == "eval":
            assert {"train_loss", "test_loss", "test_error"} <= set(event)
    if told["roles"].get("worker"):
        assert sum(told["staleness_histogram"].values()) == told["updates"]
        assert sum(told["gradients_by_rank"].values()) >= told["updates"]
        assert any("drift" in event for event in events)
        assert told["drift_max"] >= told["drift_mean"] >= 0
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert config["epochs"] == 8.0
    assert latest(out / "checkpoint") is not None


@pytest.mark.parallel(SIZES)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("cut", [1.0, 0.5])
def test_sync_resumed_is_sync_uninterrupted_to_the_bit(
    optimizer: str, cut: float, data: Path, shared_path: Path
) -> None:
    options = {"optimizer": optimizer, "model": "test_trainer:with_dropout", "model_args": {}, "batch": 3}
    if optimizer == "SGD":
        options["optimizer_args"] = {"momentum": 0.9}
    schedule = Schedule("step", milestones=[1.2])
    whole, halves = shared_path / "whole", shared_path / "halves"
    hvdist.train(Sync(), settings(data, whole, **options), schedule)
    hvdist.train(Sync(), settings(data, halves, **options, checkpoint_every=cut, epochs=cut), schedule)
    hvdist.train(Sync(), settings(data, halves, **options, resume=True), schedule)
    MPI.COMM_WORLD.Barrier()
    assert torch.equal(final_params(halves), final_params(whole))
    events = [event["event"] for event in read_record(halves / "record.jsonl")]
    assert events.count("start") == events.count("resume") == 1


def with_dropout(shape, classes: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.2), torch.nn.Linear(6, classes))


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("algorithm", cases({k: v for k, v in NEUTRAL.items() if k != "sync"}, trainers=1))
def test_one_worker_resumed_is_uninterrupted_to_the_bit(algorithm: ASGD, data: Path, shared_path: Path) -> None:
    options = {"optimizer": "Adam", "lr": 0.01, "model": "test_trainer:with_dropout", "model_args": {}}
    whole, halves = shared_path / "whole", shared_path / "halves"
    hvdist.train(algorithm, settings(data, whole, **options))
    hvdist.train(algorithm, settings(data, halves, **options, epochs=1.25))
    hvdist.train(algorithm, settings(data, halves, **options, resume=True))
    MPI.COMM_WORLD.Barrier()
    assert torch.equal(final_params(halves), final_params(whole))


@pytest.mark.parallel([3, 5])
@pytest.mark.parametrize("algorithm", cases({"dcasgd": DCASGD(), "two servers": DCASGD(servers=2)}))
def test_many_workers_resume_where_they_were(algorithm: DCASGD, data: Path, shared_path: Path) -> None:
    out = shared_path / "run"
    hvdist.train(algorithm, settings(data, out, epochs=1.5))
    first = MPI.COMM_WORLD.bcast(json.loads((out / "summary.json").read_text()) if MPI.COMM_WORLD.rank == 0 else None)
    second = hvdist.train(algorithm, settings(data, out, epochs=3.0, resume=True))
    if second is not None:
        assert second["samples"] >= 3 * 96 > first["samples"] >= 1.5 * 96
        assert second["seconds"] > first["seconds"]
        assert sum(second["gradients_by_rank"].values()) > sum(first["gradients_by_rank"].values())
        assert second["train_loss"] < first["train_loss"]


@pytest.mark.parallel([1, 2])
def test_a_finished_run_resumed_changes_nothing(data: Path, shared_path: Path) -> None:
    out = shared_path / "run"
    hvdist.train(Sync(), settings(data, out))
    MPI.COMM_WORLD.Barrier()
    before = final_params(out)
    summary = hvdist.train(Sync(), settings(data, out, resume=True))
    MPI.COMM_WORLD.Barrier()
    assert torch.equal(final_params(out), before)
    if summary is not None:
        assert summary["samples"] == 2 * 96
        assert summary["test_error"] < 1


@pytest.mark.parallel([1])
def test_a_run_is_not_written_over_by_accident(data: Path, shared_path: Path) -> None:
    out = shared_path / "run"
    hvdist.train(Sync(), settings(data, out))
    with pytest.raises(UserError, match="holds a run; give --resume .*, --overwrite .*, or another --out"):
        hvdist.train(Sync(), settings(data, out))
    stranger = out / "notes.txt"
    stranger.write_text("mine")
    hvdist.train(Sync(), settings(data, out, overwrite=True, epochs=1.0))
    assert json.loads((out / "summary.json").read_text())["epochs"] == 1.0
    assert stranger.read_text() == "mine"


@pytest.mark.parallel([2])
def test_a_run_is_not_resumed_as_another_algorithm(data: Path, shared_path: Path) -> None:
    out = shared_path / "run"
    hvdist.train(Sync(), settings(data, out))
    if MPI.COMM_WORLD.rank == 0:
        from hvdist.run_folder import check

        with pytest.raises(UserError, match="holds a run of sync, not of asgd; resume it with hvdist train sync"):
            check(out, "asgd", resume=True, overwrite=False)


@pytest.mark.parallel([1, 3])
def test_tensorboard_gets_what_the_record_gets(data: Path, shared_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = shared_path / "run"
    hvdist.train(Sync(), settings(data, out, tensorboard=True))
    MPI.COMM_WORLD.Barrier()
    board = EventAccumulator(str(out / "tensorboard"))
    board.Reload()
    told = [event["test_error"] for event in read_record(out / "record.jsonl") if event["event"] == "eval"]
    assert [point.value for point in board.Scalars("test_error")] == pytest.approx(told)


@pytest.mark.parallel([3, 5])
def test_bad_rows_on_one_rank_are_refused_counted_and_survived(data: Path, shared_path: Path) -> None:
    """NaN in the shards that local order gives to the last rank, all of them."""
    import h5py

    shard = data / "train" / "shard-00002-of-00003.h5"
    if MPI.COMM_WORLD.rank == 0:
        with h5py.File(shard, "r+") as handle:
            handle["x"][-20:] = float("nan")
    MPI.COMM_WORLD.Barrier()
    bad = MPI.COMM_WORLD.size - 1
    summary = hvdist.train(DCASGD(), settings(data, shared_path / "run", order="local", epochs=4.0))
    if summary is not None:
        assert set(summary["refused"]["not finite"]) == {bad}
        assert summary["test_error"] < 0.67
        (told,) = [event for event in read_record(shared_path / "run" / "record.jsonl") if event["event"] == "refused"]
        assert (told["reason"], told["rank"]) == ("not finite", bad)
