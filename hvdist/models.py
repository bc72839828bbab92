"""Small models that train in minutes on a CPU, built from the shape of one row and the number of classes."""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from hvdist.errors import UserError


def mlp(shape: Sequence[int], classes: int, hidden: Sequence[int] = (256, 128)) -> nn.Module:
    """Fully connected ReLU network on flattened rows; `hidden` are the widths of its layers."""
    widths = [math.prod(shape), *hidden, classes]
    layers: list[nn.Module] = [nn.Flatten()]
    for wide, narrow in itertools.pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn(shape: Sequence[int], classes: int, channels: Sequence[int] = (16, 32)) -> nn.Module:
    """3x3 convolutions with GroupNorm, each halving the image, then the mean over positions and a linear layer."""
    layers: list[nn.Module] = []
    for before, after in zip([_channels(shape), *channels][:-1], channels, strict=True):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(math.gcd(8, after), after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels[-1], classes))


def resnet20(shape: Sequence[int], classes: int, norm: str = "group") -> nn.Module:
    """ResNet-20 for small images (He et al. 2015, section 4.2), with `norm` "group" or "batch"."""
    make_norm = _norm(norm)
    blocks: list[nn.Module] = [nn.Conv2d(_channels(shape), 16, 3, padding=1, bias=False), make_norm(16), nn.ReLU()]
    width = 16
    for stage in (16, 32, 64):
        for _ in range(3):
            blocks.append(_Block(width, stage, make_norm))
            width = stage
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


class _Block(nn.Module):
    """Two 3x3 convolutions beside an identity; where the width doubles, the identity is subsampled and zero-padded."""

    def __init__(self, before: int, after: int, make_norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stride, self.pad = (2, after - before) if after != before else (1, 0)
        self.conv1 = nn.Conv2d(before, after, 3, stride=self.stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm1, self.norm2 = make_norm(after), make_norm(after)

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.norm1(self.conv1(x)))
        shortcut = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.pad))
        return functional.relu(self.norm2(self.conv2(out)) + shortcut)


def _norm(name: str) -> Callable[[int], nn.Module]:
    if name not in ("group", "batch"):
        raise UserError(f"norm is group or batch, got {name!r}")
    return nn.BatchNorm2d if name == "batch" else lambda width: nn.GroupNorm(8, width)


def _channels(shape: Sequence[int]) -> int:
    if len(shape) != 3:
        raise UserError(f"this model needs rows of shape (channels, height, width), got {tuple(shape)}; try mlp")
    return int(shape[0])


MODELS: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "cnn": cnn, "resnet20": resnet20}


def build(name: str, shape: Sequence[int], classes: int, **arguments: Any) -> nn.Module:
    """A model by name.

    Args:
        name: mlp, cnn, resnet20, or `package.module:function`, called as `function(shape, classes, **arguments)`.
        shape: of one row, without the batch.
        classes: number of classes.
        arguments: the model's own, such as `hidden=[512, 512]`.
    Raises:
        UserError: no such model or function, or arguments it does not take.
    """
    make = MODELS.get(name) or _imported(name)
    try:
        inspect.signature(make).bind(tuple(shape), classes, **arguments)
    except TypeError as error:
        raise UserError(f"model {name}{inspect.signature(make)} does not take {arguments}: {error}") from error
    return make(tuple(shape), classes, **arguments)


def _imported(name: str) -> Callable[..., nn.Module]:
    module, colon, function = name.partition(":")
    if not colon:
        raise UserError(f"no model {name!r}; there are {', '.join(MODELS)}, or your own as package.module:function")
    try:
        made: Callable[..., nn.Module] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UserError(f"model {name!r} cannot be imported: {error}") from error
    return made
