"""One rank's copy of the model: a flat parameter vector, its gradient, the optimizer and what must survive a restart.

The model's parameters are views into `params`, their gradients views into `grad`, so that a message is one vector and
costs no packing.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hvdist.errors import UserError

# Optimizers that treat every number alone: a server may run them on any slice of the vector.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD")


class Replica:
    """A model made ready for exchange.

    Attributes:
        model: the user's module; its trainable parameters now live in `params`.
        params: (d,) float32, all trainable parameters in the order of `model.parameters()`.
        grad: (d,) float32, their gradients.
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
        self.params = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        self.grad = torch.zeros_like(self.params)
        self.part = slice(0, self.params.numel())
        for parameter, view in zip(self._parameters, self._views(self.params), strict=True):
            parameter.data = view
        self._grad_views = self._views(self.grad)
        self.zero_grad()
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))

    def _views(self, flat: Tensor) -> list[Tensor]:
        pieces = flat.split(self._sizes)
        return [piece.view(p.shape) for piece, p in zip(pieces, self._parameters, strict=True)]

    def placed(self) -> Iterator[tuple[nn.Parameter, slice, Tensor]]:
        """Each trainable parameter, its place in the flat vector and its view into `grad`."""
        start = 0
        for parameter, size, view in zip(self._parameters, self._sizes, self._grad_views, strict=True):
            yield parameter, slice(start, start + size), view
            start += size

    def load(self, params: Tensor) -> None:
        """Take over parameters: (d,) in any float dtype, or those of `part` alone."""
        target = self.params if params.numel() == self.params.numel() else self.params[self.part]
        if params.shape != target.shape:
            raise ValueError(f"got parameters of shape {tuple(params.shape)}, the model needs {tuple(target.shape)}")
        target.copy_(params)

    def zero_grad(self) -> None:
        """Zero all gradients, and make them views into `grad` again."""
        self.grad.zero_()
        for parameter, view in zip(self._parameters, self._grad_views, strict=True):
            parameter.grad = view

    def gathered_grad(self) -> Tensor:
        """`grad` after a backward pass; zeros where a parameter took no part in it."""
        for parameter, view in zip(self._parameters, self._grad_views, strict=True):
            gather(parameter, view)
        return self.grad

    def step(self, grad: Tensor, scale: float = 1.0) -> None:
        """One step of the optimizer along `grad`, (d,) or the part's, with the learning rate times `scale`."""
        mine = self.grad[self.part]
        if grad.data_ptr() != mine.data_ptr():
            mine.copy_(grad)
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
        places = {id(parameter): place for parameter, place, _ in self.placed()}
        for group in self.optimizer.param_groups:
            overlaps = [_overlap(places[id(parameter)], part) for parameter in group["params"]]
            group["params"] = [self._leaf(overlap) for overlap in overlaps if overlap.start < overlap.stop]

    def _leaf(self, place: slice) -> nn.Parameter:
        leaf = nn.Parameter(self.params[place])
        leaf.grad = self.grad[place]
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
    """Make a parameter's gradient the given view again, whatever the user's `zero_grad` left in its place."""
    if parameter.grad is None:
        view.zero_()
    elif parameter.grad.data_ptr() != view.data_ptr():
        view.copy_(parameter.grad)
    parameter.grad = view


def is_finite(vector: Tensor) -> bool:
    """Whether no element is NaN or infinite, in one pass: either would show in the sum."""
    return bool(vector.sum().isfinite())


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
