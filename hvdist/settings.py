"""The settings of a training run, whatever its algorithm: fields, docstrings and defaults are the command's flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hvdist.errors import UserError
from hvdist.order import Order


@dataclass(frozen=True, kw_only=True)
class Training:
    """What to train, on what, how long, and where the run is kept."""

    data: str
    """Folder with `train` and `test` shards, made by a script of data_prep/."""
    out: str
    """Folder of the run: config.yaml, record.jsonl, summary.json, checkpoint/."""
    model: str = "mlp"
    """mlp, cnn, resnet20, or your own as package.module:function, called as function(shape, classes, **model_args)."""
    model_args: dict[str, Any] = field(default_factory=dict)
    """The model's own: --model_args.hidden '[512, 512]' (mlp), --model_args.channels '[16, 32]' (cnn),
    --model_args.norm batch (resnet20)."""
    optimizer: str = "SGD"
    """Any optimizer of torch.optim, by its name."""
    lr: float = 0.1
    """Learning rate."""
    optimizer_args: dict[str, Any] = field(default_factory=dict)
    """The optimizer's own: --optimizer_args.momentum 0.9 --optimizer_args.weight_decay 1e-4."""
    batch: int = 64
    """Rows of one rank in one step."""
    epochs: float = 5.0
    """Passes over the training rows, counted over all ranks."""
    updates: int | None = None
    """Length of the run in updates of the model, instead of epochs."""
    order: Order = "global"
    """Of the rows in an epoch: global, one permutation of all, or local, each rank permutes its own contiguous part."""
    seed: int = 0
    """Of the model's first parameters, the rows' order and everything else that is drawn."""
    eval_every: float = 1.0
    """Epochs between two evaluations; their time is not training time."""
    eval_rows: int = 10_000
    """Training rows, evenly spread, that the training loss is evaluated on."""
    checkpoint_every: float = 1.0
    """Epochs between two checkpoints; there is always one at the end."""
    log_every: float = 5.0
    """Seconds between two lines of progress where no terminal shows a bar."""
    tensorboard: bool = False
    """Also write OUT/tensorboard."""
    resume: bool = False
    """Go on from the last checkpoint in OUT, if there is one."""
    overwrite: bool = False
    """Replace the run that OUT holds."""

    def __post_init__(self) -> None:
        for name in ("batch", "epochs", "eval_every", "eval_rows", "checkpoint_every"):
            if getattr(self, name) <= 0:
                raise UserError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.updates is not None and self.updates <= 0:
            raise UserError(f"updates must be above 0, got {self.updates}")

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a model.

        Raises:
            UserError: no such optimizer, or arguments it does not take.
        """
        kinds = {name: kind for name, kind in vars(torch.optim).items() if _is_optimizer(kind)}
        if self.optimizer not in kinds:
            raise UserError(f"torch.optim has no {self.optimizer!r}; there are {', '.join(sorted(kinds))}")
        try:
            made: torch.optim.Optimizer = kinds[self.optimizer](model.parameters(), lr=self.lr, **self.optimizer_args)
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.optimizer} does not take {self.optimizer_args}: {error}") from error
        return made


def _is_optimizer(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
