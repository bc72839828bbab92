from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hvdist import Batch, Shards, Task


def batch(x: torch.Tensor, y: list[int]) -> Batch:
    return Batch(x, torch.tensor(y), torch.arange(len(y)), len(y))


def test_bytes_are_scaled_and_floats_become_float32() -> None:
    task = Task(nn.Identity())
    assert task.inputs(torch.tensor([0, 51, 255], dtype=torch.uint8)).tolist() == pytest.approx([0.0, 0.2, 1.0])
    assert task.inputs(torch.tensor([0.5], dtype=torch.float64)).dtype == torch.float32
    assert task.inputs(torch.tensor([3])).dtype == torch.int64


def test_the_gradient_is_of_the_weighted_mean_loss() -> None:
    net = nn.Linear(2, 3)
    rows = batch(torch.randn(4, 2), [0, 1, 2, 1])
    weights = torch.tensor([0.5, 2.0, 0.0, 1.0])
    Task(net).backward(rows, weights)
    got = net.weight.grad.clone()
    net.zero_grad()
    total = sum(
        w * nn.functional.cross_entropy(net(rows.x[i : i + 1]), rows.y[i : i + 1]) for i, w in enumerate(weights)
    )
    (total / 4).backward()
    torch.testing.assert_close(got, net.weight.grad)


def test_evaluation_by_hand(data: Path) -> None:
    class Always(nn.Module):
        """Says class 1 with logit log 2 against 0, whatever it sees."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tensor([0.0, 0.6931472, 0.0]).repeat(len(x), 1)

    shards = Shards(data / "test")
    ones = shards.manifest.classes[1]
    score = Task(Always()).evaluate(shards)
    assert score.error == pytest.approx(1 - ones / 30)
    assert score.loss == pytest.approx((ones * 0.6931472 + (30 - ones) * 1.3862944) / 30, rel=1e-6)


def test_evaluation_leaves_the_model_as_it_was(data: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    net.train()
    before = net[2].running_mean.clone()
    task, shards = Task(net), Shards(data / "test")
    assert task.evaluate(shards) == task.evaluate(shards)
    assert net.training
    assert torch.equal(net[2].running_mean, before)
    net.eval()
    task.evaluate(shards)
    assert not net.training


def test_evaluation_on_some_rows(data: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    task, shards = Task(net), Shards(data / "test")
    whole = task.evaluate(shards)
    halves = [task.evaluate(shards, range(15)), task.evaluate(shards, range(15, 30))]
    assert whole.loss == pytest.approx(sum(half.loss for half in halves) / 2)
    assert whole.error == pytest.approx(sum(half.error for half in halves) / 2)


def test_overriding_one_method_changes_the_answer() -> None:
    class Doubled(Task):
        def inputs(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().inputs(x)

    net = nn.Linear(2, 3, bias=False)
    x = torch.randn(4, 2)
    Doubled(net).backward(batch(x, [0, 1, 2, 1]))
    doubled = net.weight.grad.clone()
    net.zero_grad()
    Task(net).backward(batch(2 * x, [0, 1, 2, 1]))
    assert torch.equal(doubled, net.weight.grad)
