"""Servers and workers of asynchronous SGD, by hand: one role, its messages laid out, its answers given."""

from __future__ import annotations

import pytest
import torch
from hand import HandComm
from hypothesis import given
from hypothesis import strategies as st

from hvdist import ASGD, DCASGD, UserError
from hvdist.algorithms.asgd import Backups, Tag, admissible, slices, to_wire
from hvdist.messages import Message
from hvdist.questions import Answer, Gradient, Update
from hvdist.replica import Replica


def replica_of(*values: float, lr: float = 0.1, **options) -> Replica:
    model = torch.nn.Linear(len(values), 1, bias=False)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=lr, **options))
    replica.load(torch.tensor(values))
    return replica


def push(worker: int, grad: list[float] | None, version: int, samples: int = 1) -> Message:
    tensors = () if grad is None else (torch.tensor(grad),)
    return Message(worker, Tag.GRADIENT, tensors, version, samples)


def done(*workers: int) -> list[Message]:
    return [Message(worker, Tag.DONE) for worker in workers]


def serve(algorithm: ASGD, replica: Replica, inbox: list[Message], updates: int = 1000, ranks: int = 3):
    """Play server 0 until its inbox is empty; its updates, and what it sent."""
    comm = HandComm(algorithm, ranks, 0, inbox)
    algorithm.prepare(comm, replica)
    role, reply, seen = algorithm.server(comm, replica), None, []
    while True:
        try:
            update = role.send(reply)
        except StopIteration:
            return seen, comm.sent
        seen.append(update)
        reply = len(seen) < updates


def test_pushes_are_applied_as_they_come_and_answered_with_what_is_now() -> None:
    inbox = [push(1, [1.0], 0), push(2, [2.0], 0), push(1, [4.0], 1), *done(1, 2)]
    replica = replica_of(1.0)
    updates, sent = serve(ASGD(), replica, inbox)
    assert [(update.source, update.samples, update.measures["staleness"]) for update in updates] == [
        (1, 1, 0.0), (2, 1, 1.0), (1, 1, 1.0),
    ]  # fmt: skip
    answers = [(to, tag, version, tensors[0].item()) for to, tag, version, tensors in sent]
    assert answers == [
        (1, Tag.PARAMS, 1, pytest.approx(0.9)),
        (2, Tag.PARAMS, 2, pytest.approx(0.7)),
        (1, Tag.PARAMS, 3, pytest.approx(0.3)),
    ]


@pytest.mark.parametrize("delay", [0, 1, 5])
def test_each_worker_is_compensated_from_its_own_backup(delay: int) -> None:
    """The slow worker's gradient was taken `delay` updates ago: w_bak is what it got, not the last parameters."""
    fast = [push(1, [1.0], version) for version in range(delay)]
    inbox = [*fast, push(2, [0.5], 0), *done(1, 2)]
    replica = replica_of(3.0, lr=0.1)
    serve(DCASGD(strength=2.0, adaptive=False), replica, inbox)
    w = w_bak = 3.0  # worker 1's own backups are always the newest: no correction there
    for _ in range(delay):
        w -= 0.1 * 1.0
    w -= 0.1 * (0.5 + 2.0 * 0.5 * 0.5 * (w - w_bak))
    assert replica.params.item() == pytest.approx(w, abs=1e-6)


def test_the_adaptive_strength_follows_one_running_mean_square() -> None:
    inbox = [push(1, [1.0], 0), push(2, [0.5], 0), *done(1, 2)]
    replica = replica_of(3.0)
    serve(DCASGD(strength=2.0, adaptive=True, decay=0.95, epsilon=1e-7), replica, inbox)
    square = 0.05 * 1.0
    w = 3.0 - 0.1 * 1.0
    square = 0.95 * square + 0.05 * 0.25
    pull = 2.0 / (square + 1e-7) ** 0.5 * 0.25
    w -= 0.1 * (0.5 + pull * (w - 3.0))
    assert replica.params.item() == pytest.approx(w, abs=1e-6)
    assert replica.tables["mean_square"].item() == pytest.approx(square, rel=1e-5)


def test_compensation_comes_before_weight_decay_and_momentum() -> None:
    inbox = [push(1, [1.0], 0), push(2, [0.5], 0), *done(1, 2)]
    replica = replica_of(3.0, momentum=0.9, weight_decay=0.01)
    serve(DCASGD(strength=2.0, adaptive=False), replica, inbox)
    w, w_bak = 3.0, 3.0
    velocity = 1.0 + 0.01 * w
    w -= 0.1 * velocity
    grad = 0.5 + 2.0 * 0.25 * (w - w_bak)
    velocity = 0.9 * velocity + (grad + 0.01 * w)
    w -= 0.1 * velocity
    assert replica.params.item() == pytest.approx(w, abs=1e-6)


def test_strength_zero_is_asgd_to_the_bit() -> None:
    inbox = [push(1, [0.3], 0), push(2, [0.7], 0), push(1, [-1.1], 1), *done(1, 2)]
    plain, zero = replica_of(1.0), replica_of(1.0)
    serve(ASGD(), plain, list(inbox))
    serve(DCASGD(strength=0.0), zero, list(inbox))
    assert torch.equal(plain.params, zero.params)


def test_a_gradient_that_is_not_finite_is_refused_and_counted_and_answered() -> None:
    inbox = [push(1, None, 0), push(1, [1.0], 0), *done(1, 2)]
    replica = replica_of(1.0)
    updates, sent = serve(ASGD(), replica, inbox)
    assert updates[0] == Update(0, 1, "not finite", (1,))
    assert updates[1].measures["staleness"] == 0
    assert [version for _, _, version, _ in sent] == [0, 1]
    assert replica.params.item() == pytest.approx(0.9)


def test_the_end_is_told_to_every_push_and_waits_for_every_worker() -> None:
    inbox = [push(1, [1.0], 0), push(2, [2.0], 0), push(1, [4.0], 1), *done(2, 1)]
    replica = replica_of(1.0)
    updates, sent = serve(ASGD(), replica, inbox, updates=2)
    assert len(updates) == 2
    assert [len(tensors) for *_, tensors in sent] == [1, 0, 0]
    assert replica.params.item() == pytest.approx(0.7)


def test_late_gradients_are_dropped_on_demand() -> None:
    inbox = [push(1, [1.0], 0), push(1, [1.0], 1), push(2, [5.0], 0), *done(1, 2)]
    replica = replica_of(1.0)
    updates, _ = serve(ASGD(max_staleness=1, when_stale="drop"), replica, inbox)
    assert updates[2] == Update(0, 2, "too stale", (2,))
    assert replica.params.item() == pytest.approx(0.8)


def test_fast_workers_are_held_back_on_demand() -> None:
    """Worker 1 pushes three times before worker 2 comes: with a bound of 1 only its first may go ahead."""
    inbox = [push(1, [1.0], 0), push(1, [2.0], 1), push(2, [4.0], 0), *done(1, 2)]
    updates, _ = serve(ASGD(max_staleness=1), replica_of(1.0), inbox)
    assert [update.source for update in updates] == [1, 2, 1]
    assert max(update.measures["staleness"] for update in updates) == 1


def test_a_bound_that_waiting_cannot_keep_is_refused() -> None:
    with pytest.raises(UserError, match="max_staleness 1 cannot be kept .* 4 gradients .* at least 3, or when"):
        serve(ASGD(max_staleness=1, ahead=1), replica_of(1.0), [])


@given(st.integers(1, 6), st.integers(0, 4), st.integers(0, 2**31))
def test_waiting_keeps_the_bound_and_never_stops_for_good(workers: int, slack: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    limit = workers - 1 + slack
    out = dict.fromkeys(range(workers), 0)  # every worker computes on version 0
    arrived: list[int] = []
    version = 0
    for _ in range(60):
        computing = [worker for worker in out if worker not in arrived]
        if computing:
            arrived.append(computing[int(torch.randint(len(computing), (1,), generator=generator))])
        may = [worker for worker in arrived if admissible(list(out.values()), out[worker], version, limit)]
        assert may or computing, "everybody waits"
        if may:
            assert version - out[may[0]] <= limit
            arrived.remove(may[0])
            version += 1
            out[may[0]] = version
    assert version > 0


def test_the_rate_may_be_divided_by_staleness() -> None:
    inbox = [push(1, [1.0], 0), push(1, [1.0], 1), push(2, [1.0], 0), *done(1, 2)]
    replica = replica_of(1.0)
    serve(ASGD(lr_by_staleness=True), replica, inbox)
    assert replica.params.item() == pytest.approx(1.0 - 0.1 - 0.1 - 0.05)


def test_drift_is_measured_now_and_then() -> None:
    inbox = [push(1, [3.0, 4.0], 0), push(1, [0.0, 0.0], 1), push(2, [0.0, 0.0], 0), *done(1, 2)]
    updates, _ = serve(ASGD(drift_every=2), replica_of(1.0, 1.0), inbox)
    assert ["drift" in update.measures for update in updates] == [True, False, True]
    assert updates[2].measures["drift"] == pytest.approx(0.5)  # 0.1 * |(3, 4)|


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_half_precision_halves_the_wire_and_the_backup_is_what_was_sent(wire: str) -> None:
    dtype = getattr(torch, wire)
    inbox = [push(1, [1.0], 0), push(2, [1.0], 0), *done(1, 2)]
    inbox[0] = Message(1, Tag.GRADIENT, (torch.tensor([1.0], dtype=dtype),), 0, 1)
    replica = replica_of(1.2345678)
    _, sent = serve(DCASGD(strength=2.0, adaptive=False, wire=wire), replica, inbox)  # type: ignore[arg-type]
    assert sent[0][3][0].dtype == dtype
    w_bak = torch.tensor(1.2345678).to(dtype).item()
    w = 1.2345678
    for _ in range(2):
        w -= 0.1 * (1.0 + 2.0 * (w - w_bak))
    assert replica.params.item() == pytest.approx(w, abs=1e-6)


def test_finite_gradients_stay_finite_on_a_narrow_wire() -> None:
    narrow = to_wire(torch.tensor([1e9, -1e9, 1.0]), torch.float16)
    assert narrow.tolist() == [65504.0, -65504.0, 1.0]


@given(st.integers(1, 100), st.integers(1, 9))
def test_slices_cover_the_vector(size: int, servers: int) -> None:
    parts = slices(size, servers)
    assert [index for part in parts for index in range(part.start, part.stop)] == list(range(size))
    lengths = [part.stop - part.start for part in parts]
    assert max(lengths) - min(lengths) <= 1


def test_backups_are_kept_by_worker_and_in_order() -> None:
    params = torch.tensor([1.0])
    backups = Backups(params, [1, 2], 2, torch.float32)
    params.fill_(5.0)
    backups.take(1, 3, params)
    params.fill_(9.0)
    assert sorted(backups.versions) == [0, 0, 0, 0, 3]
    assert [backups.pop(push(1, [0.0], version)).item() for version in (0, 0, 3)] == [1.0, 1.0, 5.0]
    with pytest.raises(ValueError, match="rank 2 pushed for version 7; it was sent version 0"):
        backups.pop(push(2, [0.0], 7))


def work(algorithm: ASGD, replica: Replica, inbox: list[Message], answers: list[Answer], ranks: int = 3, rank: int = 1):
    """Play a worker that is given these answers; what it sent."""
    comm = HandComm(algorithm, ranks, rank, inbox)
    role, reply, left = algorithm.worker(comm, replica), None, iter(answers)
    try:
        while True:
            assert role.send(reply) == Gradient()
            reply = next(left)
            for parameter in replica.parameters:
                parameter.grad = torch.full_like(parameter, reply.samples)
    except StopIteration:
        return comm


def params(version: int, *values: float, server: int = 0) -> Message:
    return Message(server, Tag.PARAMS, (torch.tensor(values),) if values else (), version)


def test_a_worker_pushes_pulls_and_says_done() -> None:
    replica = replica_of(1.0)
    comm = work(ASGD(), replica, [params(4, 0.5), params(6)], [Answer(2), Answer(3)])
    assert [(to, tag, version, [t.item() for t in tensors]) for to, tag, version, tensors in comm.sent] == [
        (0, Tag.GRADIENT, 0, [2.0]), (0, Tag.GRADIENT, 4, [3.0]), (0, Tag.DONE, 0, []),
    ]  # fmt: skip
    assert replica.params.item() == 0.5
    assert not comm.inbox


def test_a_worker_that_looks_ahead_computes_before_its_answer_has_come() -> None:
    replica = replica_of(1.0)
    inbox = [params(1, 0.5), params(2), params(2)]
    comm = work(ASGD(ahead=1), replica, inbox, [Answer(1), Answer(2), Answer(3)])
    assert [version for _, tag, version, _ in comm.sent if tag == Tag.GRADIENT] == [0, 0, 1]
    assert comm.sent[-1][1] == Tag.DONE
    assert not comm.inbox


def test_a_worker_sends_nothing_for_a_gradient_that_is_not_finite() -> None:
    comm = work(ASGD(), replica_of(1.0), [params(0)], [Answer(2, finite=False)])
    assert comm.sent[0] == (0, Tag.GRADIENT, 0, ())


def test_a_worker_deals_with_several_servers() -> None:
    replica = replica_of(1.0, 2.0, 3.0)
    inbox = [params(1, 10.0), params(2, 20.0, 30.0, server=1), params(1), params(2, 7.0, 7.0, server=1)]
    comm = work(ASGD(servers=2), replica, inbox, [Answer(1), Answer(1)], ranks=4, rank=2)
    assert [len(tensors[0]) for _, tag, _, tensors in comm.sent if tag == Tag.GRADIENT] == [1, 2, 1, 2]
    assert [version for _, tag, version, _ in comm.sent if tag == Tag.GRADIENT] == [0, 0, 1, 2]
    assert [to for to, tag, *_ in comm.sent if tag == Tag.DONE] == [0, 1]


def test_a_driver_may_leave_a_worker_early_and_no_server_waits_for_it() -> None:
    comm = HandComm(ASGD(ahead=1), 3, 1, [params(1, 0.5)])
    replica = replica_of(1.0)
    role = ASGD(ahead=1).worker(comm, replica)
    next(role)
    replica.parameters[0].grad = torch.ones(1, 1)
    role.send(Answer(1))
    role.close()
    assert [tag for _, tag, *_ in comm.sent] == [Tag.GRADIENT, Tag.DONE]
    assert not comm.inbox


def test_servers_evaluate_with_the_mean_of_the_workers_buffers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2))
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))
    grad = torch.zeros_like(replica.params)
    buffers = {1: torch.tensor([1.0, 2.0, 3.0, 4.0]), 2: torch.tensor([3.0, 4.0, 5.0, 6.0])}
    inbox = [Message(worker, Tag.GRADIENT, (grad, buffers[worker]), 0, 1) for worker in (1, 2)]
    algorithm = ASGD()
    serve(algorithm, replica, [*inbox, *done(1, 2)])
    algorithm.collect(HandComm(algorithm, 3, 0), replica)
    assert model[1].running_mean.tolist() == [2.0, 3.0]
    assert model[1].running_var.tolist() == [4.0, 5.0]
    assert model[1].num_batches_tracked.item() == 0


def test_a_server_hands_out_its_slice_and_the_first_puts_them_together() -> None:
    algorithm = ASGD(servers=2)
    second = replica_of(1.0, 2.0, 3.0)
    comm = HandComm(algorithm, 3, 1, [Message(0, Tag.ASK), *done(2)])
    algorithm.prepare(comm, second)
    with pytest.raises(StopIteration):
        next(algorithm.server(comm, second))
    assert [(to, tag, tensors[0].tolist()) for to, tag, _, tensors in comm.sent] == [
        (0, Tag.SLICE, [2.0, 3.0]),  # when asked
        (0, Tag.SLICE, [2.0, 3.0]),  # when it ends
    ]
    first = replica_of(0.0, 0.0, 0.0)
    asking = HandComm(algorithm, 3, 0, [Message(1, Tag.SLICE, comm.sent[0][3])])
    algorithm.collect(asking, first)
    assert [(to, tag) for to, tag, *_ in asking.sent] == [(1, Tag.ASK)]
    assert first.params.tolist() == [0.0, 2.0, 3.0]


def test_the_first_server_ends_with_the_whole_model() -> None:
    algorithm = ASGD(servers=2)
    replica = replica_of(1.0, 2.0, 3.0)
    inbox = [Message(1, Tag.SLICE, (torch.tensor([8.0, 9.0]),)), push(2, [1.0], 0), *done(2)]
    serve(algorithm, replica, inbox)
    assert replica.params.tolist() == [pytest.approx(0.9), 8.0, 9.0]
