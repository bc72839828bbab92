"""The mean gradient of all ranks of a role, averaged piece by piece while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass
class _Bucket:
    """Neighbouring parameters whose gradients travel together, and how far they are in this step."""

    name: str
    parameters: list[nn.Parameter] = field(default_factory=list)
    missing: set[nn.Parameter] = field(default_factory=set)
    grad: Tensor | None = None
    pending: Any = None
    _packed: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters)

    def pack(self) -> Tensor:
        """The gradients as one vector: a lone parameter's own memory, or that of several gathered."""
        lone = self.parameters[0].grad if len(self.parameters) == 1 else None
        if lone is not None and lone.is_contiguous():
            self.grad = lone.view(-1)
            return self.grad
        if self._packed is None:
            self._packed = zeros(self.nbytes // 4)
        pieces = self._packed.split([parameter.numel() for parameter in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            gather(parameter, piece.view(parameter.shape))
        self.grad = self._packed
        return self.grad


class OverlappedMean:
    """Averages a replica's gradients over the peers, in place, each rank weighted by its examples.

    Hooks on the parameters start the mean of a bucket as soon as its last gradient is there. A backward pass goes from
    the last parameter to the first, so the last bucket goes first.
    """

    def __init__(self, replica: Replica, comm: Communicator) -> None:
        self._comm = comm
        self._share, self._armed, self._was_finite = 1.0, False, True
        self._backward_order: list[_Bucket] = []
        for number, parameter in enumerate(reversed(replica.parameters)):
            last = self._backward_order[-1] if self._backward_order else None
            if last is None or max(last.nbytes, parameter.nbytes) >= BUCKET_BYTES:
                last = _Bucket(f"gradient/{number}")
                self._backward_order.append(last)
            last.parameters.append(parameter)
            parameter.register_post_accumulate_grad_hook(self._hook(last))

    def arm(self, samples: int, total: int) -> None:
        """Before the backward pass: this rank has `samples` of the step's `total` examples."""
        self._share = samples * len(self._comm.peers) / total
        self._armed = True
        for bucket in self._backward_order:
            bucket.missing = set(bucket.parameters)

    def finish(self) -> tuple[bool, tuple[int, ...]]:
        """After it: the mean is in the parameters. Whether it is finite, and whose gradient was not. Collective."""
        self._armed = False
        for bucket in self._backward_order:
            if bucket.missing:  # parameters that took no part in the pass: their gradient is zero
                self._start(bucket)
        finite = True
        for bucket in self._backward_order:  # look at each while the next ones are still on their way
            self._comm.finish_mean(bucket.pending)
            assert bucket.grad is not None
            finite &= is_finite(bucket.grad)
        return finite, () if finite else self._culprits()

    def _hook(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        def ready(parameter: Tensor) -> None:
            if not self._armed:
                return
            if parameter not in bucket.missing:
                raise UserError("backward ran twice in one step; call it once between zero_grad() and step()")
            bucket.missing.remove(parameter)  # type: ignore[arg-type]
            if not bucket.missing:
                self._start(bucket)

        return ready

    def _start(self, bucket: _Bucket) -> None:
        bucket.missing.clear()
        grad = bucket.pack()
        if bucket is self._backward_order[0]:
            self._was_finite = is_finite(grad[:_WITNESSES])
        if self._share != 1.0:
            grad.mul_(self._share)
        bucket.pending = self._comm.start_mean(grad, bucket.name)

    def _culprits(self) -> tuple[int, ...]:
        peers = self._comm.peers
        flags = torch.zeros(len(peers))
        flags[peers.index(self._comm.rank)] = float(not self._was_finite)
        guilty = self._comm.mean(flags)
        return tuple(rank for rank, flag in zip(peers, guilty.tolist(), strict=True) if flag)
