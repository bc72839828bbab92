"""One rank's copy of the model: a flat parameter vector, the optimizer and what must survive a restart.

The model's parameters are views into `params`, so that a message is one vector. Gradients stay where a backward pass
puts them, since most algorithms only step along them; `grad` gathers them into one vector for those that send it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hvdist.buffers import zeros
from hvdist.errors import UserError

# Optimizers that treat every number alone: a server may run them on any slice of the vector.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD")


class Replica:
    """A model made ready for exchange.

    Attributes:
        model: the user's module; its trainable parameters now live in `params`.
        params: (d,) float32, all trainable parameters in the order of `model.parameters()`.
        optimizer: a `torch.optim` optimizer of this model.
        rng: the only generator a role may draw from.
        tables: named arrays a role wants to survive a restart.
        part: the slice of `params` this replica steps on; everything, unless `own` said otherwise.
    Raises:
        UserError: parameters that are not dense float32 on the CPU, an optimizer of another model or one that needs
            a closure.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
        self.model = model
        self.optimizer = optimizer
        self.rng = torch.Generator().manual_seed(seed)
        self.tables: dict[str, Tensor] = {}
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        _check(trainable, optimizer)
        self._parameters = list(trainable.values())
        self._sizes = [p.numel() for p in self._parameters]
        self.params = zeros(sum(self._sizes))
        self._grad: Tensor | None = None
        torch.cat([p.detach().reshape(-1) for p in self._parameters], out=self.params)
        self.part = slice(0, self.params.numel())
        for parameter, view in zip(self._parameters, self._views(self.params), strict=True):
            parameter.data = view
        stops = list(itertools.accumulate(self._sizes))
        self._places = {
            id(p): slice(stop - size, stop) for p, size, stop in zip(self._parameters, self._sizes, stops, strict=True)
        }
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))

    def _views(self, flat: Tensor) -> list[Tensor]:
        pieces = flat.split(self._sizes)
        return [piece.view(p.shape) for piece, p in zip(pieces, self._parameters, strict=True)]

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The trainable parameters, in their order in the flat vector."""
        return tuple(self._parameters)

    def load(self, params: Tensor) -> None:
        """Take over parameters: (d,) in any float dtype, or those of `part` alone."""
        target = self.params if params.numel() == self.params.numel() else self.params[self.part]
        if params.shape != target.shape:
            raise ValueError(f"got parameters of shape {tuple(params.shape)}, the model needs {tuple(target.shape)}")
        target.copy_(params)

    def zero_grad(self) -> None:
        """Drop all gradients: a backward pass then makes new ones instead of adding to zeros, which costs more."""
        for parameter in self._parameters:
            parameter.grad = None

    @property
    def grad(self) -> Tensor:
        """(d,) float32: the parameters' gradients in one vector, which the next call fills anew."""
        if self._grad is None:
            self._grad = zeros(self.params.numel())
        for parameter, view in zip(self._parameters, self._views(self._grad), strict=True):
            gather(parameter, view)
        return self._grad

    def step(self, grad: Tensor | None = None, scale: float = 1.0) -> None:
        """One step of the optimizer.

        Args:
            grad: (d,) float32, or the part's: the direction. None: the gradients that a backward pass left.
            scale: factor on the learning rate of this step.
        """
        if grad is not None:
            leaves = [leaf for group in self.optimizer.param_groups for leaf in group["params"]]
            for leaf in leaves:
                leaf.grad = grad[self._places[id(leaf)]].view(leaf.shape)
        with self._scaled(scale):
            self.optimizer.step()

    @contextlib.contextmanager
    def _scaled(self, scale: float) -> Iterator[None]:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * scale if scale != 1.0 else rate
        yield
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def set_lr(self, factor: float) -> None:
        """Learning rate of every group = its first value times `factor`."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor

    @property
    def lr(self) -> float:
        """The first group's learning rate."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def steps_by_plain_sgd(self) -> bool:
        """Whether a step is exactly `params -= lr * grad`, so that a server may fuse it with what comes before."""
        groups = self.optimizer.param_groups
        plain = all(not (g.get("momentum") or g.get("weight_decay") or g.get("maximize")) for g in groups)
        return type(self.optimizer) is torch.optim.SGD and plain and len({float(g["lr"]) for g in groups}) == 1

    def own(self, part: slice) -> None:
        """Step only on this slice from now on: the optimizer's parameters become their overlap with it.

        Raises:
            UserError: the optimizer looks at whole parameters, so a slice would change its result.
        """
        if part == self.part:
            return
        kind = type(self.optimizer).__name__
        if kind not in ELEMENTWISE:
            raise UserError(f"{kind} cannot run on a slice of the parameters; use one server, or {ELEMENTWISE}")
        self.part = part
        whole, self._places = self._places, {}
        for group in self.optimizer.param_groups:
            overlaps = [_overlap(whole[id(parameter)], part) for parameter in group["params"]]
            group["params"] = [self._leaf(overlap) for overlap in overlaps if overlap.start < overlap.stop]

    def _leaf(self, place: slice) -> nn.Parameter:
        """A stretch of the flat vector, as a parameter of the optimizer."""
        leaf = nn.Parameter(self.params[place])
        self._places[id(leaf)] = slice(place.start - self.part.start, place.stop - self.part.start)
        return leaf

    @property
    def float_buffers(self) -> Tensor:
        """(b,) float32: every floating buffer (BatchNorm's running statistics), one after another."""
        floats = [b.reshape(-1).float() for b in self.model.buffers() if b.is_floating_point()]
        return torch.cat(floats) if floats else torch.empty(0)

    def load_float_buffers(self, flat: Tensor) -> None:
        """Take over floating buffers from the layout of `float_buffers`; integer ones are kept."""
        start = 0
        for buffer in self.model.buffers():
            if buffer.is_floating_point():
                buffer.copy_(flat[start : start + buffer.numel()].view(buffer.shape))
                start += buffer.numel()

    def structure(self) -> str:
        """Names, shapes and dtypes of parameters and buffers, and the optimizer: equal on all ranks that exchange."""
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        lines = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
        return "\n".join([*lines, type(self.optimizer).__name__])

    def checksum(self) -> bytes:
        """(16,) bytes that differ if a parameter or a buffer differs."""
        digest = hashlib.blake2b(self.params.numpy().data, digest_size=16)
        for buffer in self.model.buffers():
            digest.update(buffer.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.digest()


def gather(parameter: nn.Parameter, view: Tensor) -> None:
    """Move a parameter's gradient into its place in the flat vector; zeros if it has none."""
    if parameter.grad is None:
        view.zero_()
    elif parameter.grad.data_ptr() != view.data_ptr():
        view.copy_(parameter.grad)
    parameter.grad = view


def is_finite(vector: Tensor) -> bool:
    """Whether no element is NaN or infinite, in one pass: either would show in the sum."""
    return math.isfinite(vector.sum().item())


def _overlap(place: slice, part: slice) -> slice:
    return slice(max(place.start, part.start), min(place.stop, part.stop))


def _check(trainable: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    if not trainable:
        raise UserError("the model has no trainable parameter")
    for name, p in trainable.items():
        if p.dtype != torch.float32 or p.device.type != "cpu":
            raise UserError(f"parameters must be float32 on the CPU; {name} is {p.dtype} on {p.device}")
    known = {id(p) for p in trainable.values()}
    if any(p.requires_grad and id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise UserError("the optimizer holds parameters that the model has not; build it from model.parameters()")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError("LBFGS needs a closure and cannot be driven; use another optimizer of torch.optim")
