"""The communicator's contract, and every trap of MPI that it hides. No test here knows how it is done."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import hvdist
from hvdist import UserError
from hvdist.algorithm import Algorithm
from hvdist.comm import mailbox
from hvdist.roles import Seat

FREE_BYTES = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
SIZES = [1, 2, 3, 5]
PAIRS = [2, 3, 5]


@dataclass(frozen=True)
class Star(Algorithm):
    """One hub, and leaves where there are ranks for them."""

    name: ClassVar[str] = "star"
    collective: ClassVar[tuple[str, ...]] = ("leaf",)
    least: int = 1

    @property
    def seats(self):
        return (Seat("hub", 1), Seat("leaf", least=self.least))


@dataclass(frozen=True)
class Ring(Algorithm):
    """Everyone alike."""

    name: ClassVar[str] = "ring"
    collective: ClassVar[tuple[str, ...]] = ("member",)

    @property
    def seats(self):
        return (Seat("member"),)


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
MATRIX = torch.arange(24.0).view(4, 6)
SHAPES = {
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "transposed": MATRIX.t(),
    "every other column": MATRIX[:, ::2],
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
    "channels last": torch.arange(48.0).view(2, 2, 3, 4).to(memory_format=torch.channels_last),
    "leading one": torch.arange(3.0).view(1, 3),
    "a parameter": torch.nn.Parameter(torch.arange(5.0)),
    "needs grad": torch.arange(5.0, requires_grad=True) * 2,
}


@pytest.mark.parallel(SIZES)
def test_every_rank_learns_its_role() -> None:
    comm = hvdist.init(Ring())
    assert comm.peers == tuple(range(comm.size))
    assert comm.leads == (comm.rank == 0)
    comm.close()


@pytest.mark.parallel(PAIRS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_as_it_was(dtype: torch.dtype) -> None:
    comm = hvdist.init(Star())
    sent = (torch.arange(-3, 9) / 3).to(dtype).view(3, 4)
    if comm.role == "leaf":
        comm.send(sent, "hub", 1)
    else:
        for leaf in comm.roles.ranks("leaf"):
            got = comm.recv(leaf, 1).payload
            assert got.dtype == dtype
            assert torch.equal(got, sent)
    comm.close()


@pytest.mark.parallel(PAIRS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lend", [False, True])
def test_every_layout_arrives_as_its_values(shape: str, lend: bool) -> None:
    comm = hvdist.init(Star())
    if comm.role == "leaf":
        comm.send(SHAPES[shape], "hub", 1, lend=lend)
    else:
        for leaf in comm.roles.ranks("leaf"):
            got = comm.recv(leaf).payload
            assert got.shape == SHAPES[shape].shape
            assert torch.equal(got, SHAPES[shape].detach())
    comm.close()


@pytest.mark.parallel(PAIRS)
def test_tuples_notices_version_and_samples_arrive() -> None:
    comm = hvdist.init(Star())
    one, two = torch.arange(3.0), torch.tensor([7], dtype=torch.int64)
    if comm.role == "leaf":
        comm.send((one, two), "hub", 4, version=2**40, samples=-5)
        comm.send(None, "hub", 5, version=comm.rank)
    else:
        for leaf in comm.roles.ranks("leaf"):
            message = comm.recv(leaf)
            assert (message.source, message.tag, message.version, message.samples) == (leaf, 4, 2**40, -5)
            assert torch.equal(message.payload[0], one)
            assert torch.equal(message.payload[1], two)
            notice = comm.recv(leaf)
            assert (notice.tag, notice.payload, notice.version) == (5, None, leaf)
    comm.close()


@pytest.mark.parallel(PAIRS)
@pytest.mark.parametrize("elements", [1000, 2_000_000])
def test_a_tensor_may_be_changed_once_it_is_sent(elements: int) -> None:
    """MPI reads a long message after the call returns: what it reads from must be a copy."""
    comm = hvdist.init(Star())
    if comm.role == "leaf":
        params = torch.zeros(elements)
        for value in range(10):
            params.fill_(value)
            comm.send(params, "hub", 1)
            params.fill_(-1)
    else:
        for leaf in comm.roles.ranks("leaf"):
            for value in range(10):
                assert (comm.recv(leaf).payload == value).all()
    comm.close()


@pytest.mark.parallel(PAIRS)
def test_a_temporary_may_be_forgotten_once_it_is_sent() -> None:
    comm = hvdist.init(Star())
    if comm.role == "leaf":
        for value in range(20):
            comm.send(torch.full((300_000,), float(value)), "hub", 1, lend=True)
            torch.full((300_000,), -1.0)  # would take the freed memory
    else:
        for leaf in comm.roles.ranks("leaf"):
            for value in range(20):
                assert (comm.recv(leaf).payload == value).all()
    comm.close()


@pytest.mark.parallel(PAIRS)
def test_what_was_received_stays_as_it_was() -> None:
    """Buffers are used again, but never while somebody holds them."""
    comm = hvdist.init(Star())
    if comm.role == "leaf":
        for value in range(6):
            comm.send(torch.full((1000,), float(value)), "hub", 1)
    else:
        for leaf in comm.roles.ranks("leaf"):
            held = [comm.recv(leaf).payload for _ in range(6)]
            assert [tensor[0].item() for tensor in held] == [0, 1, 2, 3, 4, 5]
            halves = [tensor[500:] for tensor in held]
            del held
            assert [half[0].item() for half in halves] == [0, 1, 2, 3, 4, 5]
    comm.close()


@pytest.mark.parallel(PAIRS)
def test_messages_are_picked_by_source_and_tag_and_keep_their_order() -> None:
    comm = hvdist.init(Star())
    leaves = comm.roles.ranks("leaf")
    if comm.role == "leaf":
        for number in range(3):
            comm.send(torch.tensor([float(number)]), "hub", 1)
            comm.send(torch.tensor([10.0 + number]), "hub", 2)
    else:
        for leaf in reversed(leaves):
            assert [comm.recv(leaf, 2).payload.item() for _ in range(3)] == [10, 11, 12]
        for leaf in leaves:
            assert [comm.recv(leaf, 1).payload.item() for _ in range(3)] == [0, 1, 2]
    comm.close()


@pytest.mark.parallel(PAIRS)
def test_poll_tells_without_taking() -> None:
    comm = hvdist.init(Star())
    if comm.role == "hub":
        assert not comm.poll("leaf", tag=9)
    comm.barrier()
    if comm.role == "leaf":
        comm.send(torch.ones(3), "hub", 1)
        comm.send(None, "hub", 2)
    else:
        for leaf in comm.roles.ranks("leaf"):
            while not comm.poll(leaf, 2):
                pass
            assert comm.poll(leaf, 1)
            assert comm.poll(leaf, 1)
            assert not comm.poll(leaf, 3)
            assert torch.equal(comm.recv(leaf, 1).payload, torch.ones(3))
            assert not comm.poll(leaf, 1)
            comm.recv(leaf, 2)
    comm.close()


@pytest.mark.parallel(PAIRS)
def test_many_messages_to_a_slow_receiver_wait_and_arrive() -> None:
    comm = hvdist.init(Star())
    many = 4 * mailbox.MAX_IN_FLIGHT
    if comm.role == "leaf":
        for number in range(many):
            comm.send(torch.full((50_000,), float(number)), "hub", 1)
    else:
        for leaf in reversed(comm.roles.ranks("leaf")):
            assert [comm.recv(leaf).payload[0].item() for _ in range(many)] == list(range(many))
    comm.close()


@pytest.mark.parallel(PAIRS)
def test_long_payloads_travel_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "CHUNK_BYTES", 1000)
    comm = hvdist.init(Star())
    sent = torch.arange(10_007, dtype=torch.float64)
    if comm.role == "leaf":
        comm.send(sent, "hub", 1)
        comm.send(sent[:5], "hub", 1)
    else:
        for leaf in comm.roles.ranks("leaf"):
            assert torch.equal(comm.recv(leaf).payload, sent)
            assert torch.equal(comm.recv(leaf).payload, sent[:5])
    comm.close()


@pytest.mark.parallel(2)
@pytest.mark.skipif(FREE_BYTES < 10e9, reason="needs 10 GB of memory")
def test_a_payload_over_two_gib_arrives() -> None:
    comm = hvdist.init(Star())
    elements = (1 << 31) + 16
    if comm.role == "leaf":
        sent = torch.zeros(elements, dtype=torch.uint8)
        sent[0], sent[1 << 30], sent[-1] = 1, 2, 3
        comm.send(sent, "hub", 1, lend=True)
        comm.recv("hub")
    else:
        got = comm.recv("leaf").payload
        assert got.shape == (elements,)
        assert (got[0], got[1 << 30], got[-1]) == (1, 2, 3)
        assert int(got.view(torch.int64).count_nonzero()) == 3
        comm.send(None, "leaf", 2)
    comm.close()


@pytest.mark.parallel(SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_means_of_any_float(dtype: torch.dtype) -> None:
    comm = hvdist.init(Ring())
    mine = torch.full((5, 2), float(comm.rank), dtype=dtype)
    assert comm.mean(mine) is mine
    assert (mine == torch.tensor(sum(range(comm.size)) / comm.size, dtype=torch.float64).to(dtype)).all()
    comm.close()


@pytest.mark.parallel(SIZES)
def test_means_of_strided_tensors_and_of_nothing() -> None:
    comm = hvdist.init(Ring())
    whole = torch.arange(12.0).view(3, 4).clone() * (comm.rank + 1)
    comm.mean(whole.t()[::2])
    factor = sum(range(1, comm.size + 1)) / comm.size
    wanted = torch.arange(12.0).view(3, 4) * (comm.rank + 1)
    wanted[:, ::2] = torch.arange(12.0).view(3, 4)[:, ::2] * factor
    torch.testing.assert_close(whole, wanted)
    with pytest.raises(ValueError, match="a mean needs a floating dtype, got torch.int64"):
        comm.mean(torch.ones(3, dtype=torch.int64))
    comm.close()


@pytest.mark.parallel(SIZES)
def test_means_under_way_are_matched_by_name() -> None:
    comm = hvdist.init(Ring())
    tensors = {f"t{i}": torch.full((100 * (i + 1),), float(comm.rank * (i + 1))) for i in range(4)}
    pending = {name: comm.start_mean(tensor, name) for name, tensor in tensors.items()}
    for name in tensors:
        comm.finish_mean(pending[name])
    for i, tensor in enumerate(tensors.values()):
        torch.testing.assert_close(tensor, torch.full_like(tensor, (i + 1) * (comm.size - 1) / 2))
    comm.close()


@pytest.mark.parallel([3, 5])
def test_one_role_averages_beside_another_that_does_not() -> None:
    comm = hvdist.init(Star())
    if comm.role == "leaf":
        for _ in range(3):
            assert comm.mean(torch.tensor([float(comm.rank)])).item() == sum(comm.peers) / len(comm.peers)
        comm.send(None, "hub", 1)
    else:
        for leaf in comm.roles.ranks("leaf"):
            comm.recv(leaf)
    comm.close()


@pytest.mark.parallel(SIZES)
def test_the_leaders_words_reach_everyone() -> None:
    comm = hvdist.init(Ring())
    tensor = torch.arange(5.0) if comm.leads else torch.zeros(5)
    assert torch.equal(comm.broadcast(tensor), torch.arange(5.0))
    assert comm.broadcast_bytes(b"hello" if comm.leads else b"") == b"hello"
    assert comm.broadcast_bytes() == b""
    assert comm.total(comm.rank + 0.5) == sum(range(comm.size)) + 0.5 * comm.size
    comm.agree("the same", "a text")
    comm.close()


@pytest.mark.parallel(PAIRS)
def test_bytes_are_counted() -> None:
    comm = hvdist.init(Star())
    if comm.role == "leaf":
        before = comm.bytes_sent
        comm.send(torch.zeros(1000), "hub", 1)
        assert 4000 <= comm.bytes_sent - before <= 4000 + 512
        before = comm.bytes_sent
        comm.mean(torch.zeros(1000))
        leaves = len(comm.peers)
        assert comm.bytes_sent - before == 2 * (leaves - 1) * 4000 // leaves
    else:
        for leaf in comm.roles.ranks("leaf"):
            comm.recv(leaf)
    comm.close()


@pytest.mark.parallel(PAIRS)
def test_a_message_nobody_took_is_an_error() -> None:
    comm = hvdist.init(Star())
    if comm.role == "leaf":
        comm.send(torch.ones(2), "hub", 7)
        comm.close()
    else:
        with pytest.raises(RuntimeError, match=r"\[rank 0 hub @.*messages nobody took: tag 7 from rank 1"):
            comm.close()


@pytest.mark.parallel([1])
def test_roles_that_cannot_be_filled_are_refused() -> None:
    with pytest.raises(UserError, match="1 rank cannot hold the roles: hub 1, leaf >= 1; start at least 2"):
        hvdist.init(Star())


@pytest.mark.parallel(PAIRS)
def test_a_place_must_be_held() -> None:
    comm = hvdist.init(Star())
    with pytest.raises(ValueError, match="'server' is held by ranks"):
        comm.send(None, "server", 1)
    comm.close()


@pytest.mark.parallel(SIZES)
def test_horovod_is_what_averages_where_it_is_installed() -> None:
    pytest.importorskip("horovod")
    comm = hvdist.init(Ring())
    used = type(comm._averaging).__name__
    assert used == ("Averaging" if comm.size == 1 else "HorovodAveraging")
    comm.close()


@pytest.mark.parallel(PAIRS)
def test_without_horovod_mpi_averages_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hvdist.comm.averaging._PIECE", 7)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    comm = hvdist.init(Ring())
    assert type(comm._averaging).__name__ == "Averaging"
    pending = comm.start_mean(started := torch.full((9,), float(comm.rank)), "started")
    comm.finish_mean(pending)
    assert started.tolist() == [(comm.size - 1) / 2] * 9
    assert comm.mean(torch.full((20,), float(comm.rank))).tolist() == [(comm.size - 1) / 2] * 20
    said = [record.message for record in caplog.records if "Horovod is not installed" in record.message]
    assert len(said) == (1 if comm.leads else 0)
    comm.close()


@pytest.mark.parallel(PAIRS)
def test_a_thread_level_below_multiple_is_refused_where_horovod_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("horovod")
    from hvdist.comm import averaging

    monkeypatch.setattr(averaging.MPI, "Query_thread", lambda: averaging.MPI.THREAD_SERIALIZED, raising=False)
    with pytest.raises(UserError, match="needs MPI's thread level MULTIPLE"):
        hvdist.init(Ring())
