"""ONE list of all algorithms x the properties they share. A new algorithm is a line here."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from mpi4py import MPI
from torch import nn

import hvdist
from hvdist import ASGD, DCASGD, Shards, Sync, Task, UserError
from hvdist.algorithm import Algorithm
from hvdist.roles import Roles

SIZES = [1, 2, 3, 5]
ALGORITHMS: dict[str, Algorithm] = {
    "sync": Sync(),
    "asgd": ASGD(),
    "asgd ahead": ASGD(ahead=1),
    "asgd two servers": ASGD(servers=2),
    "asgd bounded by waiting": ASGD(max_staleness=4),
    "asgd bounded by dropping": ASGD(max_staleness=1, when_stale="drop"),
    "asgd by staleness": ASGD(lr_by_staleness=True),
    "asgd bfloat16": ASGD(wire="bfloat16"),
    "dcasgd": DCASGD(),
    "dcasgd constant": DCASGD(adaptive=False, strength=0.5),
    "dcasgd everything": DCASGD(servers=2, ahead=1, wire="float16", max_staleness=20),
}
# What, on one trainer, must be plain SGD to the bit.
NEUTRAL: dict[str, Algorithm] = {
    "sync": Sync(),
    "asgd": ASGD(),
    "asgd two servers": ASGD(servers=2),
    "dcasgd": DCASGD(),
}


def cases(algorithms: dict[str, Algorithm], trainers: int | None = None):
    """Each algorithm whose roles this world can hold, and that then has so many trainers."""
    return [
        pytest.param(algorithm, id=name)
        for name, algorithm in algorithms.items()
        if (found := _trainers(algorithm)) and trainers in (None, found)
    ]


def _trainers(algorithm: Algorithm) -> int:
    """Ranks that compute gradients in this world; 0 if it cannot hold the roles."""
    try:
        roles = Roles.fill(algorithm.seats, MPI.COMM_WORLD.size)
    except UserError:
        return 0
    return len(roles.ranks("learner") + roles.ranks("worker"))


class Fit:
    """A run from a script's own loop, and what is left of it."""

    def __init__(
        self, algorithm: Algorithm, data: Path, *, batch: int = 8, epochs: float = 2.0, lr: float = 0.1,
        order: str = "global", net: nn.Module | None = None, optimizer: str = "SGD", task=None, spoil=None,
        **options,
    ) -> None:  # fmt: skip
        comm = hvdist.init(algorithm)
        shards = Shards(data / "train", comm, order=order)  # type: ignore[arg-type]
        self.net = net or nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
        loss = nn.CrossEntropyLoss(reduction="none")
        inner = getattr(torch.optim, optimizer)(self.net.parameters(), lr=lr, **options)
        self.optimizer = hvdist.DistributedOptimizer(inner, self.net, loss, algorithm, comm)
        before = Task(self.net).evaluate(shards)
        self.steps, self.rows = 0, []
        for x, y, weight in self.optimizer.steps(shards, batch, epochs=epochs):
            if spoil:
                x = spoil(comm, self.steps, x)
            self.optimizer.zero_grad()
            (weight * loss(self.net(x), y)).mean().backward()
            self.optimizer.step()
            self.steps += 1
        self.progress = self.optimizer._driver.progress
        self.before, self.after = before, Task(self.net).evaluate(shards)
        self.leads, self.rank, self.role, self.peers = comm.leads, comm.rank, comm.role, comm.peers
        comm.close()

    @property
    def params(self) -> torch.Tensor:
        return self.optimizer.replica.params


def plain_sgd(data: Path, batch: int, epochs: int, lr: float = 0.1, **options) -> torch.Tensor:
    """The parameters after torch's own SGD on the same rows, in one process."""
    from hvdist.comm.start import seed_everything

    seed_everything(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, **options)
    shards = Shards(data / "train")
    for epoch in range(epochs):
        for rows in shards.batches(batch, epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(rows.x), rows.y).backward()
            optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


@pytest.mark.parallel(SIZES)
@pytest.mark.parametrize("algorithm", cases(ALGORITHMS))
def test_the_loss_falls_and_the_leader_holds_the_model(algorithm: Algorithm, data: Path) -> None:
    fit = Fit(algorithm, data, epochs=20)
    if fit.leads:
        assert fit.after.loss < 0.7 * fit.before.loss
        assert fit.progress.samples >= 20 * 96


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("algorithm", cases(NEUTRAL, trainers=1))
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_trainer_is_plain_sgd_to_the_bit(algorithm: Algorithm, momentum: float, data: Path) -> None:
    fit = Fit(algorithm, data, batch=10, epochs=3, momentum=momentum)
    if fit.leads:
        assert torch.equal(fit.params, plain_sgd(data, 10, 3, momentum=momentum))


@pytest.mark.parallel(SIZES)
@pytest.mark.parametrize("batch", [4, 7, 30])  # 7 and 30 leave a last step whose rows do not divide
def test_sync_on_many_ranks_is_sgd_on_the_whole_batch(batch: int, data: Path) -> None:
    fit = Fit(Sync(), data, batch=batch, epochs=3)
    wanted = plain_sgd(data, batch * MPI.COMM_WORLD.size, 3)
    torch.testing.assert_close(fit.params, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parallel(SIZES)
def test_sync_takes_the_same_steps_everywhere_in_local_order(data: Path) -> None:
    fit = Fit(Sync(), data, batch=9, epochs=2, order="local")  # 96 rows never divide by 9 nor by 5
    assert fit.progress.samples == 2 * 96
    updates = MPI.COMM_WORLD.allgather(fit.progress.updates)
    params = MPI.COMM_WORLD.allgather(fit.params.numpy().tobytes())
    assert len(set(updates)) == len(set(params)) == 1


@pytest.mark.parallel([2, 3, 5])
@pytest.mark.parametrize("algorithm", cases({**ALGORITHMS, "dcasgd bounded": DCASGD(max_staleness=8)}))
def test_a_rank_ten_times_slower_neither_hangs_nor_starves(algorithm: Algorithm, data: Path) -> None:
    slow = MPI.COMM_WORLD.size - 1

    def dawdle(comm, step: int, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01 if comm.rank == slow else 0.001)
        return x

    fit = Fit(algorithm, data, epochs=6, spoil=dawdle)
    assert fit.rank != slow or fit.role == "server" or fit.steps > 0
    if fit.leads and fit.role == "server" and fit.peers == (0,):
        assert fit.progress.turns[slow] > 0


@pytest.mark.parallel([2, 3, 5])
@pytest.mark.parametrize("algorithm", cases(ALGORITHMS))
def test_nan_on_one_rank_now_and_then_is_refused_and_counted(algorithm: Algorithm, data: Path) -> None:
    bad = MPI.COMM_WORLD.size - 1

    def spoil(comm, step: int, x: torch.Tensor) -> torch.Tensor:
        return x * float("nan") if comm.rank == bad and step % 4 == 1 else x

    fit = Fit(algorithm, data, epochs=6, spoil=spoil)
    if fit.leads:
        assert torch.isfinite(fit.params).all()
        assert fit.progress.refused["not finite"][bad] > 0
        assert set(fit.progress.refused["not finite"]) == {bad}
        assert fit.progress.samples >= 6 * 96


@pytest.mark.parallel(SIZES)
@pytest.mark.parametrize("algorithm", cases(ALGORITHMS))
def test_the_loop_may_be_left_early_on_all_ranks(algorithm: Algorithm, data: Path) -> None:
    comm = hvdist.init(algorithm)
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    loss = nn.CrossEntropyLoss(reduction="none")
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = hvdist.DistributedOptimizer(inner, net, loss, algorithm, comm)
    taken = 0
    for x, y, weight in optimizer.steps(Shards(data / "train", comm), 8, epochs=1000):
        (weight * loss(net(x), y)).mean().backward()
        optimizer.step()
        taken += 1
        if taken == 3:
            break
    comm.close()


@pytest.mark.parallel(SIZES)
@pytest.mark.parametrize("algorithm", cases(ALGORITHMS))
def test_steps_may_be_called_again_and_go_on_from_the_leaders_model(algorithm: Algorithm, data: Path) -> None:
    comm = hvdist.init(algorithm)
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 3), nn.BatchNorm1d(3))
    loss = nn.CrossEntropyLoss(reduction="none")
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = hvdist.DistributedOptimizer(inner, net, loss, algorithm, comm)
    shards = Shards(data / "train", comm)
    losses = []
    for _ in range(4):
        for x, y, weight in optimizer.steps(shards, 8, epochs=3):
            (weight * loss(net(x), y)).mean().backward()
            optimizer.step()
        losses.append(Task(net).evaluate(shards).loss)
    if comm.leads:
        assert losses[-1] < losses[0]
    comm.close()


@pytest.mark.parallel([2, 3, 5])
def test_batchnorm_statistics_are_averaged_and_counts_kept(data: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6), nn.Linear(6, 3))
    fit = Fit(Sync(), data, net=net, batch=8, order="local")
    stats = MPI.COMM_WORLD.allgather(net[1].running_mean.tolist())
    assert all(mean == stats[0] for mean in stats)
    assert net[1].num_batches_tracked == fit.steps


@pytest.mark.parallel([1])
@pytest.mark.parametrize("name", [name for name, algorithm in ALGORITHMS.items() if len(algorithm.seats) > 1])
def test_illegal_sizes_are_refused_with_the_number_to_start(name: str) -> None:
    with pytest.raises(UserError, match="1 rank cannot hold the roles: .*; start at least"):
        hvdist.init(ALGORITHMS[name])


@pytest.mark.parallel([2, 3])
def test_a_model_that_differs_is_refused_where_it_differs(data: Path) -> None:
    comm = hvdist.init(Sync())
    net = nn.Linear(6, 3)
    if comm.rank == 1:
        with torch.no_grad():
            net.weight[0, 0] += 1e-6
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if comm.rank == 1:
        with pytest.raises(UserError, match="checksum of the model's parameters differs from the leader's"):
            hvdist.DistributedOptimizer(optimizer, net, nn.CrossEntropyLoss(reduction="none"), Sync(), comm)
        comm.barrier()  # the others wait in agree(); uncaught, this would have ended the job
    else:
        hvdist.DistributedOptimizer(optimizer, net, nn.CrossEntropyLoss(reduction="none"), Sync(), comm)
    comm.close()


@pytest.mark.parallel(SIZES)
def test_steps_and_step_belong_together(data: Path) -> None:
    comm = hvdist.init(Sync())
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    loss = nn.CrossEntropyLoss(reduction="none")
    optimizer = hvdist.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, loss, Sync(), comm)
    with pytest.raises(UserError, match=r"step\(\) belongs inside"):
        optimizer.step()
    with pytest.raises(UserError, match=r"step\(\) was not called"):
        for _ in optimizer.steps(Shards(data / "train", comm), 8):
            pass
    comm.close()


@pytest.mark.parallel(SIZES)
def test_gradients_may_be_clipped_once_they_are_averaged(data: Path) -> None:
    comm = hvdist.init(Sync())
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    loss = nn.CrossEntropyLoss(reduction="none")
    optimizer = hvdist.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net, loss, Sync(), comm)
    for x, y, weight in optimizer.steps(Shards(data / "train", comm), 8, updates=3):
        before = optimizer.replica.params.clone()
        (weight * loss(net(x), y)).mean().backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        optimizer.step()
        assert (optimizer.replica.params - before).norm().item() == pytest.approx(0.01, rel=1e-3)
    params = MPI.COMM_WORLD.allgather(optimizer.replica.params.numpy().tobytes())
    assert len(set(params)) == 1
    comm.close()


@pytest.mark.parallel([1, 2])
def test_a_users_own_scheduler_is_left_alone(data: Path) -> None:
    comm = hvdist.init(Sync())
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    loss = nn.CrossEntropyLoss(reduction="none")
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
    optimizer = hvdist.DistributedOptimizer(sgd, net, loss, Sync(), comm)
    for x, y, weight in optimizer.steps(Shards(data / "train", comm), 8, updates=3):
        (weight * loss(net(x), y)).mean().backward()
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.125
    comm.close()
