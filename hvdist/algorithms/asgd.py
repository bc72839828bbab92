"""Asynchronous SGD with parameter servers, plain and delay-compensated.

Workers compute gradients at whatever parameters they last got; servers apply each one when it comes. By then the
parameters have moved on. DC-ASGD corrects the gradient for that, to first order, with g g for the Hessian's diagonal.

Source: Zheng et al. 2017, arXiv:1609.08326, algorithms 1 and 2; the rate divided by staleness: Zhang et al. 2015,
arXiv:1511.05950.

| role | ranks | what it does |
|---|---|---|
| server | `servers` | owns a slice of the parameters, applies gradients as they come, answers each with its slice |
| worker | the rest | gradient, push, pull, again |

Messages, for each step of a worker, to and from every server:

| tag | from -> to | payload |
|---|---|---|
| GRADIENT | worker -> server | (slice,) in the wire's dtype; to the first server also (b,) float32, the buffers of a |
|          |                  | model that has some; nothing at all if the gradient was not finite |
| PARAMS   | server -> worker | (slice,) in the wire's dtype; nothing: the run is over |
| DONE     | worker -> server | nothing: the worker's last message |
| ASK      | first server -> server | nothing: your slice, please, the model is to be evaluated |
| SLICE    | server -> first server | (slice,) float32, when asked and when the server ends |

One worker without look-ahead never has a stale gradient: that is plain SGD, to the bit. The run ends when a server's
driver says so: the server answers every further push with nothing, and leaves when all workers are done. With several
servers and workers the pushes under way at that moment may reach some slices and not others.

Order of a server's step: gradient, compensation, then what the optimizer adds (weight decay, momentum), so that g g is
of the loss's gradient alone. One running mean square serves all workers.
Buffers (BatchNorm): every worker keeps its own; the model is evaluated and saved with the mean of the workers' last
ones, floats averaged, integers kept.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hvdist.algorithm import Algorithm, Role
from hvdist.buffers import BufferPool
from hvdist.errors import UserError
from hvdist.messages import Communicator, Message
from hvdist.questions import NOT_FINITE, TOO_STALE, Answer, Gradient, Update
from hvdist.replica import Replica
from hvdist.roles import Seat
from hvdist.update import Compensation, Kernel

log = logging.getLogger("hvdist")

Wire = Literal["float32", "bfloat16", "float16"]


class Tag(IntEnum):
    """What a message means; the table above says what it carries."""

    GRADIENT = 1
    PARAMS = 2
    DONE = 3
    ASK = 4
    SLICE = 5


def slices(size: int, servers: int) -> list[slice]:
    """A vector of `size` cut for the servers, lengths differing by at most one."""
    bounds = [size * server // servers for server in range(servers + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]


def admissible(outstanding: Sequence[int], pushed: int, version: int, limit: int) -> bool:
    """Whether a push may be applied now so that none still to come will be staler than `limit`.

    Applying it raises the version by one; those still out are then applied one by one, the oldest first.

    Args:
        outstanding: versions of the parameters every gradient still to be applied was taken at, this push's too.
        pushed: the version of this push.
        version: of the parameters now.
        limit: most updates between pull and push.

    >>> admissible([0, 2], pushed=2, version=3, limit=3)
    False
    >>> admissible([0, 2], pushed=0, version=3, limit=3)
    True
    """
    rest = sorted(outstanding)
    rest.remove(pushed)
    return all(version + 1 - old + place <= limit for place, old in enumerate(rest))


def to_wire(tensor: Tensor, wire: torch.dtype) -> Tensor:
    """In the wire's dtype; values beyond its range are clamped to it, so that a finite gradient stays finite."""
    if wire == tensor.dtype:
        return tensor
    largest = torch.finfo(wire).max
    return tensor.clamp(-largest, largest).to(wire)


class Backups:
    """w_bak: the parameters every gradient still to come is taken at, worker by worker, the oldest first.

    A backup is the very tensor that was sent, rounded to the wire's dtype if that is narrower: what the worker used.

    Args:
        params: (slice,) float32, what every worker starts from, version 0.
        workers: their ranks.
        each: gradients a worker may have out at a time.
        wire: dtype of parameters on the wire.
    """

    def __init__(self, params: Tensor, workers: Sequence[int], each: int, wire: torch.dtype) -> None:
        self._pool, self._wire = BufferPool(), wire
        first = self._snapshot(params)
        self._held = {worker: deque([(0, first)] * each) for worker in workers}

    def take(self, worker: int, version: int, params: Tensor) -> Tensor:
        """Remember what is sent to a worker now, and give it back to be sent."""
        snapshot = self._snapshot(params)
        self._held[worker].append((version, snapshot))
        return snapshot

    def pop(self, push: Message) -> Tensor:
        """The parameters this push was taken at."""
        version, backup = self._held[push.source].popleft()
        if version != push.version:
            raise ValueError(f"rank {push.source} pushed for version {push.version}; it was sent version {version}")
        return backup

    @property
    def versions(self) -> list[int]:
        """Of every gradient still to come."""
        return [version for held in self._held.values() for version, _ in held]

    def _snapshot(self, params: Tensor) -> Tensor:
        buffer = self._pool.take(params.numel() * self._wire.itemsize)
        return buffer.view(self._wire).copy_(to_wire(params, self._wire))


@dataclass(frozen=True)
class ASGD(Algorithm):
    """Asynchronous SGD: servers apply the workers' gradients as they come."""

    name: ClassVar[str] = "asgd"

    servers: int = 1
    """Ranks that hold the parameters, a slice each."""
    ahead: int = 0
    """Steps a worker computes ahead of the answer to its push, so that computing hides the wire; each adds to the
    staleness."""
    max_staleness: int | None = None
    """Most server updates between a worker's pull and the use of its gradient; no bound if not given."""
    when_stale: Literal["wait", "drop"] = "wait"
    """How `max_staleness` is kept: hold back fast workers (needs max_staleness >= workers * (1 + ahead) - 1), or refuse
    gradients that come too late and count them."""
    lr_by_staleness: bool = False
    """Divide the learning rate of an update by its staleness (Zhang et al. 2015)."""
    wire: Wire = "float32"
    """Dtype of gradients and parameters on the wire; servers compute in float32 all the same."""
    drift_every: int = 10
    """Server updates between two measurements of |w - w_bak|."""

    def __post_init__(self) -> None:
        if self.servers < 1 or self.ahead < 0 or self.drift_every < 1:
            raise UserError(f"servers and drift_every are at least 1, ahead at least 0; got {self}")

    @property
    def seats(self) -> tuple[Seat, ...]:
        """Servers first; all other ranks work."""
        return (Seat("server", self.servers), Seat("worker"))

    @property
    def compensation(self) -> Compensation:
        """The update rule; here without correction."""
        return Compensation(strength=0.0, adaptive=False, decay=0.0, epsilon=0.0)

    def prepare(self, comm: Communicator, replica: Replica) -> None:
        """Servers take their slice, compile their kernel, and check that the staleness bound can be kept."""
        if comm.role != "server":
            return
        replica.own(slices(replica.params.numel(), self.servers)[comm.rank])
        out = len(comm.roles.ranks("worker")) * (1 + self.ahead)
        if self.max_staleness is not None and self.when_stale == "wait" and self.max_staleness < out - 1:
            raise UserError(
                f"max_staleness {self.max_staleness} cannot be kept by waiting with {out} gradients out at a time; "
                f"give at least {out - 1}, or when_stale=drop"
            )
        mine = replica.params[replica.part]
        if self.compensation.adaptive:
            replica.tables.setdefault("mean_square", torch.zeros_like(mine))
        self.compensation.warm_up(mine.numel(), replica.steps_by_plain_sgd)
        log.info("server %d keeps backups for %d gradients: %.1f MB", comm.rank, out, out * mine.nbytes / 1e6)

    def collect(self, comm: Communicator, replica: Replica) -> None:
        """The first server asks the others for their slices, and averages the workers' buffers."""
        if comm.leads:
            for server in comm.peers[1:]:
                comm.send(None, server, Tag.ASK)
            self._assemble(comm, replica)

    def _assemble(self, comm: Communicator, replica: Replica) -> None:
        for server, part in zip(comm.peers[1:], slices(replica.params.numel(), self.servers)[1:], strict=True):
            replica.params[part].copy_(comm.recv(server, Tag.SLICE).tensors[0])
        buffers = [table for name, table in replica.tables.items() if name.startswith("buffers/")]
        if buffers:
            replica.load_float_buffers(torch.stack(buffers).mean(0))

    def server(self, comm: Communicator, replica: Replica) -> Role:
        """Apply what comes, answer with what is now, until every worker is done."""
        working = set(comm.roles.ranks("worker"))
        params = replica.params[replica.part]
        backups = Backups(params, sorted(working), 1 + self.ahead, getattr(torch, self.wire))
        version, going = 0, True
        waiting: list[Message] = []
        while working:
            message = comm.recv("worker" if comm.leads else None)
            if message.tag == Tag.DONE:
                working.remove(message.source)
            elif message.tag == Tag.ASK:
                comm.send(params, message.source, Tag.SLICE)
            else:
                waiting.append(message)
            while push := self._next(waiting, backups, version):
                backup = backups.pop(push)
                if going:
                    update = self._apply(push, replica, backup, version)
                    version += not update.refused
                    going = yield update
                answer = backups.take(push.source, version, params) if going else None
                comm.send(answer, push.source, Tag.PARAMS, version=version, lend=True)
        if comm.leads:
            self._assemble(comm, replica)
        else:
            comm.send(params, comm.peers[0], Tag.SLICE)

    def _next(self, waiting: list[Message], backups: Backups, version: int) -> Message | None:
        """The first push that may be applied now."""
        for push in waiting:
            bounded = self.max_staleness is not None and self.when_stale == "wait"
            if not bounded or admissible(backups.versions, push.version, version, self.max_staleness or 0):
                waiting.remove(push)
                return push
        return None

    def _apply(self, push: Message, replica: Replica, backup: Tensor, version: int) -> Update:
        """One update of this server's slice, or the refusal of one."""
        staleness = version - push.version
        if not push.tensors:
            return Update(0, push.source, NOT_FINITE, (push.source,))
        if self.max_staleness is not None and staleness > self.max_staleness:
            return Update(0, push.source, TOO_STALE, (push.source,))
        grad, *buffers = push.tensors
        if buffers:
            replica.tables[f"buffers/{push.source}"] = buffers[0]
        params = replica.params[replica.part]
        measures = {"staleness": float(staleness)}
        if version % self.drift_every == 0:
            measures["drift"] = float(torch.linalg.vector_norm(params - backup))
        scale = 1 / staleness if self.lr_by_staleness and staleness > 1 else 1.0
        self._step(replica, params, grad.float(), backup, scale)
        return Update(push.samples, push.source, measures=measures)

    def _step(self, replica: Replica, params: Tensor, grad: Tensor, backup: Tensor, scale: float) -> None:
        rule, mean_square, lr = self.compensation, replica.tables.get("mean_square"), replica.lr * scale
        if replica.steps_by_plain_sgd:
            rule.sgd_(params, grad, backup, mean_square, lr)
        else:
            rule.compensate_(params, grad, backup, mean_square, lr)
            replica.step(grad, scale)

    def worker(self, comm: Communicator, replica: Replica) -> Role:
        """Gradient, push, pull, again, until a server answers with nothing."""
        servers = comm.roles.ranks("server")
        parts = dict(zip(servers, slices(replica.params.numel(), len(servers)), strict=True))
        versions = dict.fromkeys(servers, 0)
        going, unanswered = True, 0
        with contextlib.suppress(GeneratorExit):  # a driver may leave early; no server may wait for it then
            while going:
                self._push(comm, (yield Gradient()), replica, parts, versions)
                unanswered += 1
                if unanswered > self.ahead:
                    going = self._pull(comm, replica, parts, versions)
                    unanswered -= 1
        for _ in range(unanswered):
            self._pull(comm, replica, parts, versions)
        for server in servers:
            comm.send(None, server, Tag.DONE)

    def _push(
        self, comm: Communicator, answer: Answer, replica: Replica, parts: dict[int, slice], versions: dict[int, int]
    ) -> None:
        # Without look-ahead nothing touches the gradient before its answer has come.
        lend = self.ahead == 0
        grad = replica.grad if answer.finite else None
        for server, part in parts.items():
            payload: Tensor | tuple[Tensor, ...] | None = None
            if grad is not None:
                payload = to_wire(grad[part], getattr(torch, self.wire))
                buffers = replica.float_buffers if server == 0 else torch.empty(0)
                payload = (payload, buffers) if buffers.numel() else payload
            comm.send(payload, server, Tag.GRADIENT, version=versions[server], samples=answer.samples, lend=lend)

    def _pull(self, comm: Communicator, replica: Replica, parts: dict[int, slice], versions: dict[int, int]) -> bool:
        going = True
        for server, part in parts.items():
            message = comm.recv(server, Tag.PARAMS)
            going &= bool(message.tensors)
            if message.tensors:
                replica.params[part].copy_(message.tensors[0])
                versions[server] = message.version
        return going


@dataclass(frozen=True)
class DCASGD(ASGD):
    """Delay-compensated asynchronous SGD (Zheng et al. 2017)."""

    name: ClassVar[str] = "dcasgd"

    strength: float = 2.0
    """lambda_0: how much of the delay is compensated; 0 is plain asgd. Tune it anew for another batch size unless
    adaptive."""
    adaptive: bool = True
    """Divide lambda_0 by the root of each parameter's running mean square gradient (DC-ASGD-a), else constant
    (DC-ASGD-c)."""
    decay: float = 0.95
    """m of the running mean square; 0 takes the last gradient alone."""
    epsilon: float = 1e-7
    """Added to the mean square inside the root."""
    kernel: Kernel = "auto"
    """How the server computes: compiled (one pass over memory), chunked (plain torch), or auto: compiled from a million
    parameters on, where there is a C++ compiler."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strength < 0 or not 0 <= self.decay < 1 or self.epsilon <= 0:
            raise UserError(f"strength is at least 0, decay in [0, 1), epsilon above 0; got {self}")

    @property
    def compensation(self) -> Compensation:
        """The update rule, with the correction."""
        return Compensation(self.strength, self.adaptive, self.decay, self.epsilon, self.kernel)
