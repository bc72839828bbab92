"""The mean over peers, here with one that is pretended: what is averaged, how it is weighted, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hvdist import UserError
from hvdist.overlap import BUCKET_BYTES, OverlappedMean
from hvdist.replica import Replica


class TwoRanks:
    """A communicator whose other rank's gradient is a constant, so that the mean can be worked out by hand."""

    rank, peers = 0, (0, 1)

    def __init__(self, other: float) -> None:
        self.other = other
        self.started: list[str] = []

    def start_mean(self, tensor, name):
        self.started.append(name)
        return self.mean(tensor)

    def finish_mean(self, pending) -> None:
        pass

    def mean(self, tensor):
        flags = len(tensor) == len(self.peers)  # whose gradient was not finite: the other rank's was
        return tensor if flags else tensor.add_(self.other).div_(2)


def make(comm, wide: int = 4) -> tuple[Replica, OverlappedMean]:
    net = nn.Sequential(nn.Linear(3, wide), nn.Linear(wide, 3))
    replica = Replica(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return replica, OverlappedMean(replica, comm)


def backward(replica: Replica) -> None:
    replica.zero_grad()
    (replica.model(torch.ones(5, 3)) ** 2).mean().backward()


@pytest.mark.parametrize("wide", [4, BUCKET_BYTES // 8])
def test_the_mean_is_weighted_by_examples(wide: int) -> None:
    replica, mean = make(TwoRanks(other=2.0), wide)
    backward(replica)
    alone = replica.grad.clone()
    mean.arm(samples=3, total=4)
    backward(replica)
    assert mean.finish() == (True, ())
    torch.testing.assert_close(replica.grad, (alone * 3 * 2 / 4 + 2.0) / 2)


def test_averaging_starts_before_the_backward_pass_is_over() -> None:
    comm = TwoRanks(0.0)
    replica, mean = make(comm, BUCKET_BYTES // 8)  # both weight matrices travel alone
    seen: list[int] = []
    replica.model[0].weight.register_hook(lambda grad: seen.append(len(comm.started)))
    mean.arm(1, 2)
    backward(replica)
    mean.finish()
    assert seen[0] >= 1
    assert len(comm.started) == len(set(comm.started)) >= 2


def test_a_rank_without_rows_takes_part_with_zeros() -> None:
    replica, mean = make(TwoRanks(other=2.0))
    replica.zero_grad()
    mean.arm(samples=0, total=4)
    assert mean.finish() == (True, ())
    assert (replica.grad == 1.0).all()


def test_parameters_that_take_no_part_are_averaged_as_zeros() -> None:
    replica, mean = make(TwoRanks(other=2.0), BUCKET_BYTES // 8)
    replica.zero_grad()
    mean.arm(1, 2)
    replica.model[0](torch.ones(1, 3)).sum().backward()
    assert mean.finish()[0]
    assert all((parameter.grad == 1.0).all() for parameter in replica.model[1].parameters())


def test_a_mean_that_is_not_finite_names_the_rank() -> None:
    replica, mean = make(TwoRanks(0.0))
    mean.arm(1, 2)
    replica.zero_grad()
    (replica.model(torch.full((1, 3), float("nan"))) ** 2).mean().backward()
    assert mean.finish() == (False, (0,))


def test_a_mean_spoilt_by_another_rank_does_not_name_this_one() -> None:
    replica, mean = make(TwoRanks(float("inf")))
    mean.arm(1, 2)
    backward(replica)
    assert mean.finish() == (False, ())


def test_two_backward_passes_in_one_step_are_refused() -> None:
    replica, mean = make(TwoRanks(0.0))
    mean.arm(1, 2)
    backward(replica)
    with pytest.raises(UserError, match="backward ran twice"):
        backward(replica)


def test_hooks_sleep_between_steps() -> None:
    comm = TwoRanks(0.0)
    replica, _ = make(comm)
    backward(replica)
    assert comm.started == []
