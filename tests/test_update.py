"""The delay-compensated update against hand-worked numbers and against the formula in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdist.update import CHUNK, Compensation, adapted, compensated, has_compiler, running_mean_square

KERNELS = ["chunked", pytest.param("compiled", marks=pytest.mark.skipif(not has_compiler(), reason="no C++ compiler"))]


def test_the_correction_by_hand() -> None:
    # g = 0.5, lambda g g = 0.5, w - w_bak = 0.2: g + 0.1
    grad, params, backup = torch.tensor([0.5]), torch.tensor([1.2]), torch.tensor([1.0])
    assert compensated(grad, params, backup, 2.0, 100.0).item() == pytest.approx(0.6)


def test_the_pull_is_clamped_where_it_would_overshoot() -> None:
    # lr lambda g g = 0.5 * 2 * 9 = 9: clamped to 1, so w lands on w_bak - lr g
    lr, grad, params, backup = 0.5, torch.tensor([3.0]), torch.tensor([2.0]), torch.tensor([1.0])
    step = lr * compensated(grad, params, backup, 2.0, 1 / lr)
    assert (params - step).item() == pytest.approx(1.0 - 0.5 * 3.0)


def test_mean_square_and_strength_by_hand() -> None:
    square = running_mean_square(torch.tensor([4.0]), torch.tensor([2.0]), 0.75)
    assert square.item() == 0.75 * 4 + 0.25 * 4
    assert adapted(2.0, torch.tensor([0.25]), 0.0).item() == 4.0
    assert adapted(2.0, torch.tensor([0.0]), 0.25).item() == 4.0  # epsilon inside the root


def reference(adaptive: bool, params, grad, backup, mean_square, lr: float):
    """The whole update in float64, written from the paper, clamp included."""
    w, g, bak, square = (vector.double() for vector in (params, grad, backup, mean_square))
    strength = torch.full_like(w, 2.0)
    if adaptive:
        square = 0.95 * square + 0.05 * g**2
        strength = 2.0 / (square + 1e-7).sqrt()
    pull = torch.minimum(lr * strength * g**2, torch.ones_like(w))
    return w - lr * g - pull * (w - bak), square


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("adaptive", "lr"), [*itertools.product([False, True], [0.01, 1.0])])
def test_kernels_agree_with_the_formula(kernel: str, adaptive: bool, lr: float) -> None:
    size = CHUNK + 1001 if kernel == "chunked" else 5003
    params, grad, mean_square = torch.randn(size), torch.randn(size) * 2, torch.rand(size)
    backup = params + torch.randn(size)
    rule = Compensation(2.0, adaptive, 0.95, 1e-7, kernel)  # type: ignore[arg-type]
    wanted, wanted_square = reference(adaptive, params, grad, backup, mean_square, lr)

    fused, fused_square = params.clone(), mean_square.clone()
    rule.sgd_(fused, grad, backup, fused_square if adaptive else None, lr)
    torch.testing.assert_close(fused.double(), wanted, rtol=1e-5, atol=1e-5)

    split, split_square = grad.clone(), mean_square.clone()
    rule.compensate_(params, split, backup, split_square if adaptive else None, lr)
    torch.testing.assert_close((params - lr * split).double(), wanted, rtol=1e-5, atol=1e-5)
    if adaptive:
        for square in (fused_square, split_square):
            torch.testing.assert_close(square.double(), wanted_square, rtol=1e-6, atol=1e-6)


@given(st.floats(0.001, 10), st.floats(0, 5), st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_no_step_overshoots_the_backup(lr: float, strength: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    grad, params, backup = torch.randn(3, 64, generator=generator) * 10
    stepped = params.clone()
    Compensation(strength, False, 0.0, 1e-7, "chunked").sgd_(stepped, grad, backup, None, lr)
    # without the gradient's own step, w must stay between where it was and w_bak
    pulled = (stepped + lr * grad - params).double()
    towards = (backup - params).double()
    slack = 1e-4 * (1 + lr * grad.abs().double() + towards.abs())
    assert (pulled * towards.sign() >= -slack).all()
    assert (pulled.abs() <= towards.abs() + slack).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_strength_zero_is_sgd_to_the_bit(kernel: str) -> None:
    params, grad, backup = torch.randn(3, 1003)
    mine, theirs = params.clone(), torch.nn.Parameter(params.clone())
    Compensation(0.0, True, 0.95, 1e-7, kernel).sgd_(mine, grad, backup, None, 0.1)  # type: ignore[arg-type]
    theirs.grad = grad.clone()
    torch.optim.SGD([theirs], lr=0.1).step()
    assert torch.equal(mine, theirs.detach())


def test_without_delay_a_step_is_sgd_to_the_bit() -> None:
    params, grad = torch.randn(2, 1003)
    mine = params.clone()
    Compensation(2.0, False, 0.0, 1e-7, "chunked").sgd_(mine, grad, params, None, 0.1)
    assert torch.equal(mine, params.add(grad, alpha=-0.1))


def test_half_precision_backups_are_used_as_they_are() -> None:
    params, grad = torch.randn(2, 1003)
    backup = (params + 0.1).bfloat16()
    mine, wide = params.clone(), params.clone()
    rule = Compensation(2.0, False, 0.0, 1e-7, "chunked")
    rule.sgd_(mine, grad, backup, None, 0.1)
    rule.sgd_(wide, grad, backup.float(), None, 0.1)
    assert torch.equal(mine, wide)


def test_a_learning_rate_of_zero_changes_nothing() -> None:
    params, grad, backup = torch.randn(3, 100)
    before = params.clone()
    Compensation(2.0, False, 0.0, 1e-7, "chunked").sgd_(params, grad, backup, None, 0.0)
    assert torch.equal(params, before)
