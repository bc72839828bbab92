"""Messages from rank to rank.

A message is a header and then the raw bytes of its tensors, each kind on an MPI communicator of its own. MPI keeps the
order per sender, so the bytes that follow a header belong to it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hvdist.buffers import BufferPool
from hvdist.comm.patience import Patience
from hvdist.messages import (
    HEADER_BYTES,
    HEADER_LENGTH,
    Message,
    Payload,
    pack_header,
    raw_bytes,
    tensors_of,
    unpack_header,
)

CHUNK_BYTES = 1 << 30
"""Longer payloads travel in pieces: most MPIs count in 32 bits."""
MAX_IN_FLIGHT = 8
"""Messages to one peer under way before `send` waits: a slow receiver must not fill the sender's memory."""


class _Outgoing:
    """A message under way: MPI reads from its buffers until all requests are complete."""

    def __init__(self, requests: list[MPI.Request], buffers: list[np.ndarray]) -> None:
        self._requests = requests
        self._buffers = buffers

    def arrived(self) -> bool:
        return bool(MPI.Request.Testall(self._requests))


class Mailbox:
    """Typed messages between the ranks of `world`."""

    def __init__(self, world: MPI.Intracomm, patience: Patience) -> None:
        self._headers, self._bodies = world.Dup(), world.Dup()
        self._patience = patience
        self._pool = BufferPool()
        self._outgoing: dict[int, deque[_Outgoing]] = defaultdict(deque)
        self._stash: deque[Message] = deque()
        self._header = np.empty(HEADER_LENGTH, np.int64)
        self.bytes_sent = 0

    def send(self, payload: Payload, to: int, tag: int, version: int, samples: int, lend: bool) -> None:
        """Start sending; what MPI reads from is a copy unless the tensors are lent."""
        queue = self._outgoing[to]
        if len(queue) >= MAX_IN_FLIGHT:
            self._patience.until(lambda: self._reap(queue))
        given = (payload,) if isinstance(payload, Tensor) else payload or ()
        tensors = tensors_of(payload)
        header = pack_header(tensors, version, samples)
        requests, buffers = [self._headers.Isend(header, to, tag)], [header]
        for tensor, original in zip(tensors, given, strict=True):
            is_copy = tensor.data_ptr() != original.data_ptr()
            body = raw_bytes(tensor if lend or is_copy else self._copy(tensor)).numpy()
            buffers.append(body)
            requests += [self._bodies.Isend([piece, MPI.BYTE], to) for piece in _pieces(body)]
            self.bytes_sent += body.nbytes
        self.bytes_sent += HEADER_BYTES
        queue.append(_Outgoing(requests, buffers))
        self._reap(queue)

    def recv(self, ranks: Collection[int], tag: int | None) -> Message:
        """The oldest message from one of the ranks, waiting for it; others that come first are kept for later."""
        for message in self._stash:
            if _fits(message, ranks, tag):
                self._stash.remove(message)  # by identity
                return message
        while not _fits(message := self._read(self._patience.until(self._probe)), ranks, tag):
            self._stash.append(message)
        return message

    def poll(self, ranks: Collection[int], tag: int | None) -> bool:
        """Whether such a message has come."""
        while (found := self._probe()) is not None:
            self._stash.append(self._read(found))
        return any(_fits(message, ranks, tag) for message in self._stash)

    def flush(self, deadline_seconds: float = float("inf")) -> None:
        """Wait until every message has left."""
        for queue in self._outgoing.values():
            self._patience.until(lambda queue=queue: self._reap(queue) and not queue, deadline_seconds)  # type: ignore[misc]

    def unread(self) -> list[Message]:
        """What came and nobody took."""
        self.poll((), None)
        return list(self._stash)

    def free(self) -> None:
        """Give the communicators back to MPI."""
        self._headers.Free()
        self._bodies.Free()

    def _copy(self, tensor: Tensor) -> Tensor:
        buffer = self._pool.take(tensor.nbytes)
        return buffer.copy_(raw_bytes(tensor))

    def _reap(self, queue: deque[_Outgoing]) -> bool:
        while queue and queue[0].arrived():
            queue.popleft()
        return len(queue) < MAX_IN_FLIGHT

    def _probe(self) -> tuple[MPI.Message, MPI.Status] | None:
        status = MPI.Status()
        found = self._headers.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        return None if found is None else (found, status)

    def _read(self, found: tuple[MPI.Message, MPI.Status]) -> Message:
        message, status = found
        message.Recv(self._header)
        kinds, version, samples = unpack_header(self._header)
        source = status.Get_source()
        tensors = tuple(self._read_tensor(source, dtype, shape) for dtype, shape in kinds)
        return Message(source, status.Get_tag(), tensors, version, samples)

    def _read_tensor(self, source: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        buffer = self._pool.take(nbytes)
        pieces = _pieces(buffer.numpy())
        requests = [self._bodies.Irecv([piece, MPI.BYTE], source) for piece in pieces]
        statuses = [MPI.Status() for _ in requests]
        self._patience.until(lambda: MPI.Request.Testall(requests, statuses))
        got = sum(status.Get_count(MPI.BYTE) for status in statuses)
        if got != nbytes:
            raise ValueError(f"rank {source} announced {nbytes} bytes ({dtype}, {shape}) and sent {got}")
        return buffer.view(dtype).view(shape)


def _pieces(body: np.ndarray) -> list[np.ndarray]:
    return [body[start : start + CHUNK_BYTES] for start in range(0, body.nbytes, CHUNK_BYTES)]


def _fits(message: Message, ranks: Collection[int], tag: int | None) -> bool:
    return message.source in ranks and (tag is None or message.tag == tag)
