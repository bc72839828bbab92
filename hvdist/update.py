"""The delay-compensated update, the server's hot path, in one pass over memory.

    w <- w - lr (g + lambda_t g g (w - w_bak))

lambda_t is a constant lambda_0, or lambda_0 / sqrt(MeanSquare + epsilon) for each parameter. Source: Zheng et al. 2017,
arXiv:1609.08326 (the update rules of DC-ASGD-c and DC-ASGD-a).

The correction pulls w toward w_bak by the factor lr lambda_t g g. Beyond 1 it overshoots and the run diverges, so that
factor is clamped to 1.
"""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

CHUNK = 384 * 1024
"""Elements the fallback works on at a time: more leave the caches, fewer cost more calls."""
_TINY = 1e-38  # below it, 1 / x is no float32
WORTH_COMPILING = 1_000_000
"""Parameters from which on a one-time compilation of seconds pays."""

Kernel = Literal["auto", "compiled", "chunked"]


def adapted(strength: Tensor | float, mean_square: Tensor, epsilon: float) -> Tensor:
    """lambda_t of DC-ASGD-a: lambda_0 / sqrt(MeanSquare + epsilon), of the shape of `mean_square`."""
    return strength * torch.rsqrt(mean_square + epsilon)


def running_mean_square(mean_square: Tensor, grad: Tensor, decay: float) -> Tensor:
    """MeanSquare <- m MeanSquare + (1 - m) g g, starting from 0 without bias correction."""
    return decay * mean_square + (1 - decay) * (grad * grad)


def compensated(
    grad: Tensor, params: Tensor, backup: Tensor, strength: Tensor | float, limit: Tensor | float
) -> Tensor:
    """The delayed gradient, corrected to first order for what happened since.

    g + min(lambda_t g g, 1 / lr) (w - w_bak)

    Args:
        grad: (d,) float32, taken at `backup`.
        params: (d,) float32, w, the server's parameters now.
        backup: (d,) float, w_bak, the parameters the gradient was taken at.
        strength: lambda_t, a number or (d,).
        limit: 1 / lr.
    Returns:
        (d,) float32.

    >>> g, w, w_bak = torch.tensor([0.5]), torch.tensor([2.0]), torch.tensor([1.0])
    >>> compensated(g, w, w_bak, 2.0, 10.0)
    tensor([1.])
    """
    return grad + torch.clamp(strength * (grad * grad), max=limit) * (params - backup)


@dataclass(frozen=True)
class Compensation:
    """The update with its settings chosen.

    Attributes:
        strength: lambda_0; 0 switches the correction off, which leaves plain asynchronous SGD.
        adaptive: lambda_t from the running mean square.
        decay: m, of the mean square.
        epsilon: inside its square root.
        kernel: compiled (torch.compile, one pass over memory), chunked (plain torch, cache by cache), or auto:
            compiled where there is a C++ compiler and the vector is long enough to pay for it.
    """

    strength: float
    adaptive: bool
    decay: float
    epsilon: float
    kernel: Kernel = "auto"

    def sgd_(self, params: Tensor, grad: Tensor, backup: Tensor, mean_square: Tensor | None, lr: float) -> None:
        """One step of plain SGD along the compensated gradient, in place; `mean_square` too, where adaptive."""
        if self.strength == 0:
            params.add_(grad, alpha=-lr)
        elif self._compiles(params.numel()):
            self._run_compiled(_sgd, params, grad, backup, mean_square, lr)
        else:
            # w - lr g - min(lr lambda g g, 1) (w - w_bak): what is left of the last term is an interpolation
            for w, g, bak, pull in self._pulls(params, grad, backup, mean_square, lr * self.strength, 1.0):
                w.lerp_(bak.float(), pull)
                w.add_(g, alpha=-lr)

    def compensate_(self, params: Tensor, grad: Tensor, backup: Tensor, mean_square: Tensor | None, lr: float) -> None:
        """Make `grad` the compensated gradient, in place, for any other optimizer to step along."""
        if self.strength == 0:
            return
        if self._compiles(params.numel()):
            self._run_compiled(_compensate, params, grad, backup, mean_square, lr)
        else:
            limit = 1 / lr if lr > _TINY else math.inf
            for w, g, bak, pull in self._pulls(params, grad, backup, mean_square, self.strength, limit):
                g.addcmul_(pull, w - bak)

    def warm_up(self, size: int, fused: bool) -> None:
        """Compile now what the first step of `size` parameters would compile; `fused`: for `sgd_`."""
        if self.strength and self._compiles(size):
            params, grad, backup, mean_square = torch.zeros(4, size)
            (self.sgd_ if fused else self.compensate_)(params, grad, backup, mean_square, lr=0.1)

    def _compiles(self, size: int) -> bool:
        return self.kernel == "compiled" or (self.kernel == "auto" and size >= WORTH_COMPILING and has_compiler())

    def _run_compiled(
        self, body: _Body, params: Tensor, grad: Tensor, backup: Tensor, mean_square: Tensor | None, lr: float
    ) -> None:
        # The rate is a tensor so that a schedule does not compile anew at every value.
        rate = torch.tensor(lr)
        if not self.adaptive:
            _compiled(_constant)(body, params, grad, backup, rate, self.strength)
        else:
            _compiled(_adaptive)(body, params, grad, backup, mean_square, rate, self.strength, self.decay, self.epsilon)

    def _pulls(
        self, params: Tensor, grad: Tensor, backup: Tensor, mean_square: Tensor | None, scale: float, limit: float
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Chunk by chunk: w, g, w_bak and min(scale g g [/ sqrt(MeanSquare + epsilon)], limit)."""
        nothing, pulls, roots = _scratch()
        squares = [None] * math.ceil(params.numel() / CHUNK) if mean_square is None else mean_square.split(CHUNK)
        chunks = (vector.split(CHUNK) for vector in (params, grad, backup))
        for w, g, bak, square in zip(*chunks, squares, strict=True):
            zero, pull, root = nothing[: w.numel()], pulls[: w.numel()], roots[: w.numel()]
            if square is None:
                torch.addcmul(zero, g, g, value=scale, out=pull)
            else:
                torch.mul(g, g, out=pull)
                square.lerp_(pull, 1 - self.decay)
                torch.add(square, self.epsilon, out=root)
                torch.addcmul(zero, pull, root.rsqrt_(), value=scale, out=pull)
            yield w, g, bak, pull.clamp_(max=limit)


_Body = Callable[[Tensor, Tensor, Tensor, Tensor | float, Tensor], None]


def _sgd(params: Tensor, grad: Tensor, backup: Tensor, strength: Tensor | float, lr: Tensor) -> None:
    params.copy_(params - lr * compensated(grad, params, backup, strength, 1 / lr))


def _compensate(params: Tensor, grad: Tensor, backup: Tensor, strength: Tensor | float, lr: Tensor) -> None:
    grad.copy_(compensated(grad, params, backup, strength, 1 / lr))


def _constant(body: _Body, params: Tensor, grad: Tensor, backup: Tensor, lr: Tensor, strength: float) -> None:
    body(params, grad, backup, strength, lr)


def _adaptive(
    body: _Body, params: Tensor, grad: Tensor, backup: Tensor, mean_square: Tensor, lr: Tensor,
    strength: float, decay: float, epsilon: float,
) -> None:  # fmt: skip
    square = running_mean_square(mean_square, grad, decay)
    mean_square.copy_(square)
    body(params, grad, backup, adapted(strength, square, epsilon), lr)


@functools.cache
def _scratch() -> tuple[Tensor, Tensor, Tensor]:
    """Zeros and two buffers of (CHUNK,) float32, kept: fresh memory would cost page faults at every update."""
    return torch.zeros(CHUNK), torch.empty(CHUNK), torch.empty(CHUNK)


@functools.cache
def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    # A pool of compiler processes would be forked from inside MPI.
    torch._inductor.config.compile_threads = 1
    compiled: Callable[..., None] = torch.compile(function, dynamic=False)
    return compiled


@functools.cache
def has_compiler() -> bool:
    """Whether torch.compile finds a C++ compiler."""
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))
