"""`hvdist bench pushpull`."""

# No `from __future__ import annotations`: the command line would import every name above to resolve it, MPI too.

import socket
import threading
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed
from torch.distributed import rpc

from hvdist.algorithms.asgd import ASGD, Tag
from hvdist.bench.timing import Timed, medians, on_ranks, print_ratios
from hvdist.buffers import zeros

if TYPE_CHECKING:
    from hvdist.comm import Comm

_FLOOR, _OURS, _COPIED = "mpi4py buffers (floor)", "hvdist, lent", "hvdist, copied"
_RPC = "torch.distributed.rpc"


def pushpull(parameters: int = 10_000_000, rounds: int = 15) -> None:
    """Time a worker's push and pull between two ranks beside mpi4py, gloo and torch's rpc.

    Args:
        parameters: Length of the vector each way, float32.
        rounds: Of which the median is taken.
    """
    if not on_ranks(2):
        return
    from hvdist.comm import init

    comm = init(ASGD())
    vector = zeros(parameters).normal_()
    _join_torch(comm)
    pickled = _pickled(comm.rank, vector)
    timed: dict[str, Timed] = {
        _FLOOR: _buffers(comm.rank, vector),
        _OURS: lambda: _messages(comm, vector, lend=True),
        _COPIED: lambda: _messages(comm, vector, lend=False),
        "mpi4py, pickled": pickled,
        "torch.distributed, gloo": lambda: _gloo(comm.rank, vector),
        _RPC: lambda: _rpc(comm.rank, vector),
    }
    medians(timed, 2, comm.barrier)
    result = medians(timed, rounds, comm.barrier)
    if comm.role == "worker":
        print(f"push and pull of {parameters:,} float32, 2 ranks, medians of {rounds} interleaved rounds\n")
        print_ratios(result, _FLOOR, {_OURS: "bar 1.3"})
        print(f"\n{_RPC} takes {result[_RPC] / result[_OURS]:.1f} x as long as hvdist; bar 5")
    comm.barrier()
    rpc.shutdown()
    distributed.destroy_process_group()
    comm.close()


def _messages(comm: "Comm", vector: Tensor, lend: bool) -> None:
    """As a worker and a server of asgd do it."""
    if comm.role == "worker":
        comm.send(vector, "server", Tag.GRADIENT, lend=lend)
        comm.recv("server", Tag.PARAMS)
    else:
        push = comm.recv("worker")
        comm.send(vector, push.source, Tag.PARAMS, lend=lend)


def _buffers(rank: int, vector: Tensor) -> Timed:
    from mpi4py import MPI

    world, mine, theirs = MPI.COMM_WORLD, vector.numpy(), zeros(len(vector)).numpy()

    def exchange() -> None:
        if rank == 1:
            world.Send(mine, 0)
        world.Recv(theirs, 1 - rank)
        if rank == 0:
            world.Send(mine, 1)

    return exchange


def _pickled(rank: int, vector: Tensor) -> Timed:
    from mpi4py import MPI

    world, mine = MPI.COMM_WORLD, vector.numpy()

    def exchange() -> None:
        if rank == 1:
            world.send(mine, 0)
        world.recv(source=1 - rank)
        if rank == 0:
            world.send(mine, 1)

    return exchange


def _join_torch(comm: "Comm") -> None:
    """Start gloo and rpc between the two ranks, on ports the leader found free."""
    ports = comm.broadcast(torch.tensor(_free_ports(2))).tolist()
    where = [f"tcp://127.0.0.1:{port}" for port in ports]
    distributed.init_process_group("gloo", init_method=where[0], rank=comm.rank, world_size=2)
    options = rpc.TensorPipeRpcBackendOptions(init_method=where[1])
    rpc.init_rpc(f"rank{comm.rank}", rank=comm.rank, world_size=2, rpc_backend_options=options)


def _gloo(rank: int, vector: Tensor) -> None:
    theirs = torch.empty_like(vector)
    if rank == 1:
        distributed.send(vector, 0)
    distributed.recv(theirs, 1 - rank)
    if rank == 0:
        distributed.send(vector, 1)


_served = threading.Event()


def _serve(vector: Tensor) -> Tensor:
    """The server's side of rpc, in a thread of torch's."""
    _served.set()
    return vector


def _rpc(rank: int, vector: Tensor) -> None:
    if rank == 1:
        rpc.rpc_sync("rank0", _serve, (vector,))
    else:  # sleep, lest the server's thread shares the core with this one
        _served.wait()
        _served.clear()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
