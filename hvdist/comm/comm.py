"""What a rank may do with the others: the communicator that roles, drivers and scripts call."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from torch import Tensor

from hvdist.comm.averaging import Averaging, averaged, averaging_over
from hvdist.comm.guard import watch
from hvdist.comm.mailbox import Mailbox
from hvdist.comm.patience import Patience
from hvdist.comm.probe import library
from hvdist.errors import UserError
from hvdist.messages import Message, Payload, raw_bytes
from hvdist.roles import Roles


class Comm:
    """The communicator over MPI. Made by `hvdist.init`; places are ranks, or a role's name.

    Attributes:
        rank, size: of this process in the world.
        roles: who plays what.
        host: this node's name.
    """

    def __init__(self, world: MPI.Intracomm, roles: Roles, patience: Patience, collective: bool) -> None:
        self.rank, self.size = world.rank, world.size
        self.roles = roles
        self.host = socket.gethostname()
        # Leaving has a communicator of its own: a barrier there meets no other rank's barrier of another kind.
        self._world, self._exit = world, world.Dup()
        self._patience = patience
        self._mailbox = Mailbox(world, patience)
        self._peers = _peers_of(world, roles)
        make = averaging_over if collective else Averaging
        self._averaging = make(self._peers, patience)
        self._averaged_bytes = 0

    @property
    def role(self) -> str:
        """This rank's role."""
        return self.roles.names[self.rank]

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks of this rank's role, ascending."""
        return self.roles.ranks(self.role)

    @property
    def leads(self) -> bool:
        """Whether this rank evaluates, records and saves: true on exactly one."""
        return self.rank == 0

    @property
    def label(self) -> str:
        """Who speaks: "[rank 3 worker @node17]"."""
        return watch().label

    @property
    def library(self) -> str:
        """The MPI library and its version."""
        return library()

    def send(
        self, payload: Payload, to: int | str, tag: int, *, version: int = 0, samples: int = 0, lend: bool = False
    ) -> None:
        """Send without waiting for the receiver.

        Args:
            payload: nothing, a tensor, or up to four; any dtype, any strides.
            to: a rank, or the name of a role that one rank holds.
            tag: what the message means, from the algorithm's IntEnum.
            version, samples: travel in the header.
            lend: the tensors stay as they are until the receiver has answered, so no copy is taken.
        """
        self._mailbox.send(payload, self._ranks(to, one=True)[0], tag, version, samples, lend)

    def recv(self, source: int | str | None = None, tag: int | None = None) -> Message:
        """The oldest message from that rank, any rank of that role, or anyone, waiting for it."""
        return self._mailbox.recv(self._ranks(source), tag)

    def poll(self, source: int | str | None = None, tag: int | None = None) -> bool:
        """Whether `recv` would return at once."""
        return self._mailbox.poll(self._ranks(source), tag)

    def mean(self, tensor: Tensor) -> Tensor:
        """Average over the ranks of this role, in place; any float dtype, half types summed in float32. Collective."""
        self._averaged_bytes += tensor.nbytes
        return averaged(self._averaging, tensor)

    def start_mean(self, tensor: Tensor, name: str) -> Any:
        """Begin averaging a contiguous float32 tensor in place; not to be touched before `finish_mean`."""
        self._averaged_bytes += tensor.nbytes
        return self._averaging.start(tensor, name)

    def finish_mean(self, pending: Any) -> None:
        """Wait for a mean; every rank of the role finishes in the same order."""
        self._averaging.finish(pending)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Give every rank of the world the leader's contiguous tensor, in place. Collective over the world."""
        for piece in raw_bytes(tensor).split(1 << 30):
            self._world.Bcast([piece.numpy(), MPI.BYTE])
        return tensor

    def broadcast_bytes(self, data: bytes = b"") -> bytes:
        """The leader's bytes on every rank. Collective over the world."""
        length = np.array([len(data)], np.int64)
        self._world.Bcast(length)
        buffer = bytearray(data) if self.leads else bytearray(int(length[0]))
        self._world.Bcast([buffer, MPI.BYTE])
        return bytes(buffer)

    def total(self, value: float) -> float:
        """The sum over the world. Collective over the world."""
        mine, summed = np.array([value], np.float64), np.empty(1, np.float64)
        self._world.Allreduce(mine, summed)
        return float(summed[0])

    def agree(self, text: str, what: str) -> None:
        """Refuse to go on if a rank's text differs from the leader's. Collective over the world.

        Raises:
            UserError: on each rank that differs.
        """
        mine = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if self.broadcast_bytes(mine) != mine:
            raise UserError(f"{what} differs from the leader's (rank 0): here it is\n{text}")
        self.barrier()

    def barrier(self) -> None:
        """Wait for every rank of the world."""
        self._patience.until(self._world.Ibarrier().Test)

    def now(self) -> float:
        """Seconds on a clock of this rank's own."""
        return time.perf_counter()

    @property
    def bytes_sent(self) -> int:
        """What this rank sent: its messages, and of each mean what a ring moves, 2 (K-1)/K of the tensor."""
        peers = len(self.peers)
        return self._mailbox.bytes_sent + 2 * (peers - 1) * self._averaged_bytes // peers

    def close(self) -> None:
        """Leave together with all others. Collective over the world.

        Raises:
            RuntimeError: a message came that nobody took: a fault of the algorithm.
        """
        self.leave()

    def leave(self, deadline_seconds: float = float("inf")) -> None:
        """`close`, within a deadline.

        Raises:
            TimeoutError: the others did not leave in time.
        """
        self._mailbox.flush(deadline_seconds)
        self._averaging.leave(deadline_seconds)
        self._patience.until(self._exit.Ibarrier().Test, deadline_seconds)
        watch().leave = None
        unread = self._mailbox.unread()
        self._mailbox.free()
        for communicator in (self._peers, self._world, self._exit):
            communicator.Free()
        if unread:
            kinds = ", ".join(f"tag {message.tag} from rank {message.source}" for message in unread)
            raise RuntimeError(f"{self.label} {len(unread)} messages nobody took: {kinds}")

    def _ranks(self, place: int | str | None, one: bool = False) -> Sequence[int]:
        if place is None:
            return range(self.size)
        ranks = (place,) if isinstance(place, int) else self.roles.ranks(place)
        if not ranks or (one and len(ranks) != 1):
            raise ValueError(f"{place!r} is held by ranks {ranks} of {self.roles}")
        return ranks


def _peers_of(world: MPI.Intracomm, roles: Roles) -> MPI.Intracomm:
    """A communicator of the ranks that share this rank's role. Collective over the world."""
    colours = list(dict.fromkeys(roles.names))
    peers: MPI.Intracomm = world.Split(colours.index(roles.names[world.rank]), world.rank)  # type: ignore[assignment]
    return peers
