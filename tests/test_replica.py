from __future__ import annotations

import pytest
import torch
from torch import nn

from hvdist import UserError
from hvdist.replica import ELEMENTWISE, Replica, is_finite


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def replica(optimizer: str = "SGD", net: nn.Module | None = None, **options) -> Replica:
    net = net or model()
    return Replica(net, getattr(torch.optim, optimizer)(net.parameters(), lr=0.1, **options))


def backward(net: nn.Module) -> None:
    (net(torch.ones(5, 3)) ** 2).mean().backward()


def test_parameters_are_views_into_one_vector() -> None:
    made = replica()
    assert made.params.shape == (3 * 4 + 4 + 4 * 2 + 2,)
    made.params.fill_(0.5)
    assert all((parameter == 0.5).all() for parameter in made.model.parameters())
    assert torch.equal(made.model(torch.ones(1, 3)), torch.full((1, 2), 0.5 * 4 * 2.0 + 0.5))


def test_making_a_replica_keeps_the_values() -> None:
    net = model()
    before = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    assert torch.equal(replica(net=net).params, before)


def test_gradients_are_gathered_in_the_order_of_the_parameters() -> None:
    made = replica()
    backward(made.model)
    wanted = torch.cat([p.grad.reshape(-1) for p in made.parameters])
    assert torch.equal(made.grad, wanted)
    assert torch.equal(made.grad, wanted)  # again: nothing moved


def test_a_parameter_that_took_no_part_has_zero_gradient() -> None:
    made = replica()
    backward(made.model)
    made.grad.fill_(7.0)
    made.zero_grad()
    made.model[0](torch.ones(5, 3)).sum().backward()
    assert (made.grad[16:] == 0).all()
    assert (made.grad[:16] == 5).all()


@pytest.mark.parametrize("optimizer", ELEMENTWISE)
def test_a_step_along_a_vector_is_the_optimizers_step(optimizer: str) -> None:
    mine, theirs = replica(optimizer), model()
    theirs.load_state_dict(mine.model.state_dict())
    plain = getattr(torch.optim, optimizer)(theirs.parameters(), lr=0.1)
    for _ in range(3):
        direction = torch.randn_like(mine.params)
        mine.step(direction)
        for parameter, piece in zip(theirs.parameters(), direction.split([12, 4, 8, 2]), strict=True):
            parameter.grad = piece.view(parameter.shape).clone()
        plain.step()
    assert torch.equal(mine.params, torch.cat([p.detach().reshape(-1) for p in theirs.parameters()]))


@pytest.mark.parametrize("optimizer", ELEMENTWISE)
def test_slices_of_a_step_make_the_whole_step(optimizer: str) -> None:
    torch.manual_seed(1)
    whole = replica(optimizer)
    parts = [replica(optimizer) for _ in range(2)]
    for part, bounds in zip(parts, (slice(0, 13), slice(13, 26)), strict=True):  # 13 cuts through a parameter
        part.load(whole.params)
        part.own(bounds)
    for _ in range(3):
        direction = torch.randn_like(whole.params)
        whole.step(direction)
        for part in parts:
            part.step(direction[part.part].clone())
    together = torch.cat([part.params[part.part] for part in parts])
    torch.testing.assert_close(together, whole.params, rtol=1e-6, atol=1e-7)


def test_groups_keep_their_own_settings_on_a_slice() -> None:
    net = model()
    groups = [{"params": net[0].parameters(), "lr": 1.0}, {"params": net[2].parameters(), "lr": 0.0}]
    made = Replica(net, torch.optim.SGD(groups, lr=0.1))
    made.own(slice(10, 20))
    before = made.params.clone()
    made.step(torch.ones(10))
    moved = (before - made.params).nonzero().flatten().tolist()
    assert moved == list(range(10, 16))


def test_an_optimizer_that_looks_at_whole_parameters_cannot_be_sliced() -> None:
    net = nn.Linear(4, 4, bias=False)
    made = Replica(net, torch.optim.Muon(net.parameters(), lr=0.1))
    with pytest.raises(UserError, match="Muon cannot run on a slice"):
        made.own(slice(0, 8))


def test_the_rate_is_scaled_for_one_step_and_set_by_a_factor() -> None:
    made = replica()
    before = made.params.clone()
    made.step(torch.ones_like(before), scale=0.5)
    torch.testing.assert_close(before - made.params, torch.full_like(before, 0.05))
    assert made.lr == 0.1
    made.set_lr(0.5)
    made.set_lr(0.5)
    assert made.lr == 0.05


def test_plain_sgd_is_recognised() -> None:
    assert replica().steps_by_plain_sgd
    assert not replica(momentum=0.9).steps_by_plain_sgd
    assert not replica(weight_decay=0.1).steps_by_plain_sgd
    assert not replica("Adam").steps_by_plain_sgd


def test_buffers_floats_travel_and_integers_stay() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    made = replica(net=net)
    net(torch.randn(8, 3))
    flat = made.float_buffers
    assert flat.shape == (4,)
    made.load_float_buffers(flat + 1)
    assert torch.equal(made.float_buffers, flat + 1)
    assert net[1].num_batches_tracked.item() == 1
    assert replica().float_buffers.shape == (0,)


def test_tied_and_frozen_parameters() -> None:
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 1))
    net[1].weight = net[0].weight
    net[2].weight.requires_grad_(False)
    made = Replica(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert made.params.shape == (9 + 1,)
    net(torch.ones(2, 3)).sum().backward()
    assert torch.equal(made.grad[:9].view(3, 3), net[0].weight.grad)


def test_checksum_and_structure_tell_differences() -> None:
    torch.manual_seed(0)
    one = replica()
    torch.manual_seed(0)
    two = replica()
    assert one.checksum() == two.checksum()
    assert one.structure() == two.structure()
    two.params[3] += 1e-6
    assert one.checksum() != two.checksum()
    assert one.structure() != replica("Adam").structure()
    assert one.structure() != replica(net=nn.Linear(3, 2)).structure()


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (lambda: nn.Linear(2, 2).double(), "weight is torch.float64"),
        (lambda: nn.Linear(2, 2).bfloat16(), "weight is torch.bfloat16"),
        (lambda: nn.Linear(2, 2, device="meta"), "on meta"),
    ],
)
def test_parameters_that_cannot_be_exchanged_are_refused(net, message: str) -> None:
    with pytest.raises(UserError, match=message):
        replica(net=net())


def test_senseless_optimizers_are_refused() -> None:
    net = model()
    with pytest.raises(UserError, match="optimizer holds parameters that the model has not"):
        Replica(net, torch.optim.SGD(model().parameters(), lr=0.1))
    with pytest.raises(UserError, match="LBFGS needs a closure"):
        Replica(net, torch.optim.LBFGS(net.parameters()))
    with pytest.raises(UserError, match="no trainable parameter"):
        Replica(nn.ReLU(), torch.optim.SGD(net.parameters(), lr=0.1))


def test_parameters_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\), the model needs \(26,\)"):
        replica().load(torch.zeros(3))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_element_shows(bad: float) -> None:
    vector = torch.randn(100_003) * 1e6
    assert is_finite(vector)
    vector[77_777] = bad
    assert not is_finite(vector)
    vector[5] = -bad
    assert not is_finite(vector)
