"""The mean gradient of all ranks of a role, averaged piece by piece while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hvdist.errors import UserError
from hvdist.messages import Communicator
from hvdist.replica import Replica, gather, is_finite

BUCKET_BYTES = 1 << 20
"""Gradients are averaged in runs of at least this size: less costs latency, more leaves less to overlap."""


@dataclass
class _Bucket:
    """Neighbouring parameters whose gradients travel together, and how far they are in this step."""

    place: slice
    parameters: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    missing: set[nn.Parameter] = field(default_factory=set)
    pending: Any = None

    @property
    def full(self) -> bool:
        return bool(4 * (self.place.stop - self.place.start) >= BUCKET_BYTES)


class OverlappedMean:
    """Averages a replica's gradient over the peers, each rank weighted by its examples.

    Hooks on the parameters start the mean of a bucket as soon as its last gradient is there. A backward pass fills the
    flat vector from its end, so the last bucket goes first.
    """

    def __init__(self, replica: Replica, comm: Communicator) -> None:
        self._grad, self._comm = replica.grad, comm
        self._share, self._armed = 1.0, False
        self._was_finite = True
        self._buckets: list[_Bucket] = []
        for parameter, place, view in replica.placed():
            if not self._buckets or self._buckets[-1].full:
                self._buckets.append(_Bucket(place))
            bucket = self._buckets[-1]
            bucket.place = slice(bucket.place.start, place.stop)
            bucket.parameters[parameter] = view
            parameter.register_post_accumulate_grad_hook(self._hook(bucket))

    def arm(self, samples: int, total: int) -> None:
        """Before the backward pass: this rank has `samples` of the step's `total` examples."""
        self._share = samples * len(self._comm.peers) / total
        self._armed = self._was_finite = True
        for bucket in self._buckets:
            bucket.missing = set(bucket.parameters)

    def finish(self) -> tuple[Tensor | None, tuple[int, ...]]:
        """After it: the mean gradient, (d,) float32, or None and the ranks whose own was not finite. Collective."""
        self._armed = False
        backward_order = self._buckets[::-1]
        for bucket in backward_order:
            if bucket.missing:  # parameters that took no part in the pass: their gradient is zero
                self._start(bucket)
        for bucket in backward_order:
            self._comm.finish_mean(bucket.pending)
        return (self._grad, ()) if is_finite(self._grad) else (None, self._culprits())

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
        for parameter, view in bucket.parameters.items():
            gather(parameter, view)
        bucket.missing.clear()
        grad = self._grad[bucket.place]
        self._was_finite &= is_finite(grad)
        if self._share != 1.0:
            grad.mul_(self._share)
        bucket.pending = self._comm.start_mean(grad, f"gradient/{bucket.place.start}")

    def _culprits(self) -> tuple[int, ...]:
        peers = self._comm.peers
        flags = torch.zeros(len(peers))
        flags[peers.index(self._comm.rank)] = float(not self._was_finite)
        guilty = self._comm.mean(flags)
        return tuple(rank for rank, flag in zip(peers, guilty.tolist(), strict=True) if flag)
