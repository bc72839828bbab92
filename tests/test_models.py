from __future__ import annotations

import pytest
import torch

from hvdist import UserError
from hvdist.models import build


@pytest.mark.parametrize(
    ("name", "shape", "arguments", "parameters"),
    [
        ("mlp", (1, 28, 28), {}, 784 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10),
        ("mlp", (6,), {"hidden": []}, 6 * 10 + 10),
        ("cnn", (1, 28, 28), {}, (9 * 16 + 16) + 2 * 16 + (9 * 16 * 32 + 32) + 2 * 32 + (4 * 32 * 10 + 10)),
        ("cnn", (3, 8, 8), {"channels": [4]}, (27 * 4 + 4) + 2 * 4 + (16 * 10 + 10)),
        # He et al. 2015, table 6: 0.27 million
        ("resnet20", (3, 32, 32), {"norm": "batch"}, 269_722),
        ("resnet20", (1, 28, 28), {"norm": "group"}, 269_722 - 2 * 9 * 16),
    ],
)
def test_models_have_the_parameters_they_should(name: str, shape, arguments, parameters: int) -> None:
    net = build(name, shape, 10, **arguments)
    assert sum(p.numel() for p in net.parameters()) == parameters
    assert net(torch.rand(2, *shape)).shape == (2, 10)


def test_ones_own_model_is_imported_and_called() -> None:
    net = build("hvdist.models:mlp", (4,), 3, hidden=[5])
    assert net(torch.rand(2, 4)).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("mpl", {}, "no model 'mpl'; there are mlp, cnn, resnet20, or your own as package.module:function"),
        ("nowhere:make", {}, "cannot be imported"),
        ("hvdist.models:nothing", {}, "cannot be imported"),
        ("mlp", {"width": 3}, "mlp.*does not take {'width': 3}"),
        ("cnn", {}, r"needs rows of shape \(channels, height, width\), got \(4,\); try mlp"),
        ("resnet20", {"norm": "layer"}, "norm is group or batch, got 'layer'"),
    ],
)
def test_what_cannot_be_built_is_said(name: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(name, (4,), 3, **arguments)
