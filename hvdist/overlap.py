"""The mean gradient of all ranks of a role, averaged piece by piece while the backward pass still runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvdist.buffers import zeros
from hvdist.errors import UserError
from hvdist.messages import Communicator
from hvdist.replica import Replica, gather, is_finite

BUCKET_BYTES = 1 << 20
"""A parameter of this size travels alone, from where it is; smaller ones travel together."""
# A loss that is not finite shows in the last layer's gradient: looking at these costs less than at all of them.
_WITNESSES = 1024


class _Bucket:
    """Neighbouring parameters whose gradients travel together, and how far they are in this step.

    Attributes:
        missing: gradients of this step still to come; 0 once the mean is under way.
        grad: what is averaged, flat: a lone parameter's own memory, or that of several gathered.
        pending: the mean under way.
    """

    def __init__(self, name: str, parameters: Sequence[nn.Parameter]) -> None:
        self.name, self.parameters = name, parameters
        self.missing = 0
        self.grad = torch.empty(0)
        self.pending: Any = None

    @functools.cached_property
    def _packed(self) -> tuple[Tensor, list[Tensor]]:
        """Room for all gradients, and each one's place in it."""
        sizes = [parameter.numel() for parameter in self.parameters]
        room = zeros(sum(sizes))
        return room, [piece.view(p.shape) for piece, p in zip(room.split(sizes), self.parameters, strict=True)]

    def pack(self) -> Tensor:
        """Make the gradients one vector."""
        lone = self.parameters[0].grad if len(self.parameters) == 1 else None
        if lone is not None and lone.is_contiguous():
            self.grad = lone.view(-1)
        else:
            self.grad, places = self._packed
            for parameter, place in zip(self.parameters, places, strict=True):
                gather(parameter, place)
        return self.grad


def _buckets(parameters: Iterable[nn.Parameter]) -> list[_Bucket]:
    """Parameters of BUCKET_BYTES and more alone, smaller neighbours together."""
    groups: list[list[nn.Parameter]] = []
    for parameter in parameters:
        last_bytes = sum(p.nbytes for p in groups[-1]) if groups else BUCKET_BYTES
        if max(last_bytes, parameter.nbytes) >= BUCKET_BYTES:
            groups.append([])
        groups[-1].append(parameter)
    return [_Bucket(f"gradient/{number}", group) for number, group in enumerate(groups)]


class OverlappedMean:
    """Averages a replica's gradients over the peers, in place, each rank weighted by its examples.

    Hooks on the parameters start the mean of a bucket as soon as its last gradient is there. A backward pass goes from
    the last parameter to the first, so the last bucket goes first; the first one has nothing left to overlap with and
    is averaged at once.
    """

    def __init__(self, replica: Replica, comm: Communicator) -> None:
        self._comm = comm
        self._share, self._armed, self._was_finite = 1.0, False, True
        *self._early, self._final = _buckets(reversed(replica.parameters))
        self._witness = self._early[0] if self._early else self._final
        for bucket in (*self._early, self._final):
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._hook(bucket))

    def arm(self, samples: int, total: int) -> None:
        """Before the backward pass: this rank has `samples` of the step's `total` examples."""
        self._share = samples * len(self._comm.peers) / total
        self._armed = True
        for bucket in (*self._early, self._final):
            bucket.missing = len(bucket.parameters)

    def finish(self) -> tuple[bool, tuple[int, ...]]:
        """After it: the mean is in the parameters. Whether it is finite, and whose gradient was not. Collective."""
        self._armed = False
        for bucket in self._early:
            if bucket.missing:  # parameters that took no part in the pass: their gradient is zero
                self._start(bucket)
        finite = is_finite(self._comm.mean(self._weighted(self._final)))
        for bucket in self._early:
            self._comm.finish_mean(bucket.pending)
            finite &= is_finite(bucket.grad)
        return finite, () if finite else self._culprits()

    def _hook(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        def ready(parameter: Tensor) -> None:
            if not self._armed:
                return
            if not bucket.missing:
                raise UserError("backward ran twice in one step; call it once between zero_grad() and step()")
            bucket.missing -= 1
            if not bucket.missing and bucket is not self._final:
                self._start(bucket)

        return ready

    def _start(self, bucket: _Bucket) -> None:
        bucket.missing = 0
        bucket.pending = self._comm.start_mean(self._weighted(bucket), bucket.name)

    def _weighted(self, bucket: _Bucket) -> Tensor:
        """A bucket's gradient, times this rank's share in the mean."""
        grad = bucket.pack()
        if bucket is self._witness:
            self._was_finite = is_finite(grad[:_WITNESSES])
        return grad.mul_(self._share) if self._share != 1.0 else grad

    def _culprits(self) -> tuple[int, ...]:
        peers = self._comm.peers
        flags = torch.zeros(len(peers))
        flags[peers.index(self._comm.rank)] = float(not self._was_finite)
        guilty = self._comm.mean(flags)
        return tuple(rank for rank, flag in zip(peers, guilty.tolist(), strict=True) if flag)
