from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from hvdist import UserError
from hvdist.checkpoint import latest, restore, save
from hvdist.replica import Replica


def replica(optimizer: str = "SGD", width: int = 4, **options) -> Replica:
    net = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    return Replica(net, getattr(torch.optim, optimizer)(net.parameters(), lr=0.1, **options))


def step(one: Replica, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    one.step(torch.randn(one.params[one.part].shape, generator=generator))


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("SGD", {}), ("SGD", {"momentum": 0.9}), ("Adam", {}), ("AdamW", {"amsgrad": True}), ("Adagrad", {})],
)
def test_going_on_from_a_save_is_as_if_nothing_happened(tmp_path: Path, optimizer: str, options) -> None:
    one = replica(optimizer, **options)
    one.model(torch.randn(8, 3))
    one.tables["scores"] = torch.arange(5.0)
    for seed in range(3):
        step(one, seed)
    save(tmp_path, 1, 0, 1, one, {"seconds": 1.5})
    two = replica(optimizer, **options)
    assert restore(tmp_path, 1, two, 0) == {"seconds": 1.5}
    assert torch.equal(two.params, one.params)
    assert torch.equal(two.float_buffers, one.float_buffers)
    assert torch.equal(two.tables["scores"], torch.arange(5.0))
    for seed in range(3, 6):
        step(one, seed)
        step(two, seed)
    assert torch.equal(two.params, one.params)


def test_parts_make_the_whole_and_each_server_takes_its_own_back(tmp_path: Path) -> None:
    parts = [replica("Adam") for _ in range(2)]
    half = parts[0].params.numel() // 2
    bounds = (slice(0, half), slice(half, parts[0].params.numel()))
    for number, (one, part) in enumerate(zip(parts, bounds, strict=True)):
        one.own(part)
        step(one, number)
        save(tmp_path, 7, number, 2, one, {"part": number})
    whole = torch.cat([one.params[one.part] for one in parts])
    for number, part in enumerate(bounds):
        server = replica("Adam")
        server.own(part)
        assert restore(tmp_path, 7, server, number) == {"part": 0}
        assert torch.equal(server.params, whole)
        step(server, 9)
        step(parts[number], 9)
        assert torch.equal(server.params[part], parts[number].params[part])
    worker = replica("Adam")
    restore(tmp_path, 7, worker, None)
    assert torch.equal(worker.params, whole)
    assert not worker.optimizer.state_dict()["state"]


def test_only_whole_saves_count_and_two_are_kept(tmp_path: Path) -> None:
    one = replica()
    assert latest(tmp_path) is None
    for number in (1, 2, 3):
        save(tmp_path, number, 0, 1, one, {})
    assert sorted(os.listdir(tmp_path)) == ["000002", "000003"]
    (tmp_path / "000003" / "part-00000-of-00001.safetensors").rename(tmp_path / "000003" / "part-00000-of-00001.tmp")
    assert latest(tmp_path) == 2  # killed while it wrote
    save(tmp_path, 4, 1, 2, one, {})
    assert latest(tmp_path) == 2  # the other server was killed


def test_no_pickle_is_written(tmp_path: Path) -> None:
    one = replica("Adam")
    step(one, 0)
    save(tmp_path, 1, 0, 1, one, {})
    data = (tmp_path / "000001" / "part-00000-of-00001.safetensors").read_bytes()
    assert data[8:9] == b"{"  # safetensors: the length of a JSON header, then the header
    assert b"torch._utils" not in data


def test_another_model_or_other_servers_are_refused(tmp_path: Path) -> None:
    save(tmp_path, 1, 0, 1, replica(), {})
    with pytest.raises(UserError, match="holds 34 parameters, this model has 42"):
        restore(tmp_path, 1, replica(width=5), 0)
    server = replica()
    server.own(slice(0, 10))
    with pytest.raises(UserError, match="saved by 1 ranks; resume with as many servers"):
        restore(tmp_path, 1, server, 0)
