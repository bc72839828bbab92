"""What travels between ranks: a fixed header that describes itself, then raw tensors. Never pickle.

The header tells dtype and shape of every tensor, the version of the parameters behind it and the examples behind it, so
that a receiver never takes one thing for another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hvdist.roles import Roles

MAX_TENSORS = 4
MAX_DIMS = 8
_MAGIC = 0x6876_6469_7374_0001
_PREFIX = 4
_PER_TENSOR = 2 + MAX_DIMS
HEADER_LENGTH = _PREFIX + MAX_TENSORS * _PER_TENSOR
"""int64 words."""
HEADER_BYTES = 8 * HEADER_LENGTH

# The place in this list is the code on the wire: append, never reorder.
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip

Payload = Tensor | tuple[Tensor, ...] | None


@dataclass(frozen=True, eq=False)
class Message:
    """A received message.

    Attributes:
        source: rank that sent it.
        tag: what it means, from the algorithm's own IntEnum.
        tensors: what it carries, in the order sent; empty for a bare notice.
        version: the sender's count of the parameters behind it.
        samples: examples behind it.
    """

    source: int
    tag: int
    tensors: tuple[Tensor, ...] = ()
    version: int = 0
    samples: int = 0

    @property
    def payload(self) -> Payload:
        """What was given to `send`: None, one tensor, or a tuple of them."""
        if len(self.tensors) <= 1:
            return self.tensors[0] if self.tensors else None
        return self.tensors


class Communicator(Protocol):
    """What a role may call. `comm.Comm` is it over MPI; places are ranks, or the name of a role one rank holds."""

    rank: int
    roles: Roles

    @property
    def role(self) -> str:
        """This rank's role."""

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks of this rank's role, ascending."""

    @property
    def leads(self) -> bool:
        """Whether this rank evaluates, records and saves."""

    def send(
        self, payload: Payload, to: int | str, tag: int, *, version: int = 0, samples: int = 0, lend: bool = False
    ) -> None:
        """Send without waiting for the receiver; a copy is taken unless the tensor is lent."""

    def recv(self, source: int | str | None = None, tag: int | None = None) -> Message:
        """The oldest message from that rank or role, or from anyone, waiting for it."""

    def poll(self, source: int | str | None = None, tag: int | None = None) -> bool:
        """Whether `recv` would return at once."""

    def mean(self, tensor: Tensor) -> Tensor:
        """Average a tensor over the peers, in place."""

    def start_mean(self, tensor: Tensor, name: str) -> Any:
        """Begin averaging a tensor in place; it must not be touched before `finish_mean`."""

    def finish_mean(self, pending: Any) -> None:
        """Wait for a mean that was started."""


def tensors_of(payload: Payload) -> tuple[Tensor, ...]:
    """The payload as a tuple of detached, contiguous CPU tensors.

    Raises:
        ValueError: more tensors, dimensions or another dtype than the header can describe.
    """
    tensors = () if payload is None else (payload,) if isinstance(payload, Tensor) else payload
    if len(tensors) > MAX_TENSORS:
        raise ValueError(f"a message carries at most {MAX_TENSORS} tensors, got {len(tensors)}")
    for tensor in tensors:
        if tensor.dtype not in _DTYPES or tensor.dim() > MAX_DIMS or tensor.device.type != "cpu":
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise ValueError(
                f"a message carries CPU tensors of at most {MAX_DIMS} dimensions and dtype {kinds}; "
                f"got {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
            )
    return tuple(tensor.detach().contiguous() for tensor in tensors)


def pack_header(tensors: tuple[Tensor, ...], version: int, samples: int) -> np.ndarray:
    """The header of a message, (HEADER_LENGTH,) int64."""
    header = np.zeros(HEADER_LENGTH, np.int64)
    header[:_PREFIX] = _MAGIC, len(tensors), version, samples
    for place, tensor in enumerate(tensors):
        start = _PREFIX + place * _PER_TENSOR
        header[start : start + 2 + tensor.dim()] = _DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape
    return header


def unpack_header(header: np.ndarray) -> tuple[list[tuple[torch.dtype, tuple[int, ...]]], int, int]:
    """Dtype and shape of each tensor, the version and the samples.

    Raises:
        ValueError: not a header of this format.
    """
    magic, count, version, samples = (int(word) for word in header[:_PREFIX])
    if magic != _MAGIC or not 0 <= count <= MAX_TENSORS:
        raise ValueError("a message does not begin with hvdist's header: do all ranks run the same version of hvdist?")
    kinds = []
    for place in range(count):
        code, dims, *shape = (int(word) for word in header[_PREFIX + place * _PER_TENSOR :][:_PER_TENSOR])
        kinds.append((_DTYPES[code], tuple(shape[:dims])))
    return kinds, version, samples


def raw_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as (nbytes,) uint8, without a copy: any dtype travels so."""
    return tensor.reshape(-1).view(torch.uint8)
