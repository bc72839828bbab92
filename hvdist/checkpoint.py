"""Saving and restoring a run: numbered saves, each whole or ignored, the last two kept.

    OUT/checkpoint/000003/part-00000-of-00002.safetensors     one part for each rank that holds state of its own

A part carries its slice of the parameters, its optimizer's state and tables, and in its header, as JSON, how far the
run was. No pickle is read or written.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hvdist.errors import UserError
from hvdist.replica import Replica

if TYPE_CHECKING:
    from hvdist.comm import Comm

_KEPT = 2


class Saves:
    """The saves of a run, as one rank writes and reads them.

    The leader saves, and so does every other rank whose replica steps on a slice of its own.
    """

    def __init__(self, folder: Path, comm: Comm, replica: Replica) -> None:
        self._folder, self._comm, self._replica = folder, comm, replica
        sliced = replica.part.stop - replica.part.start < replica.params.numel()
        self._parts = len(comm.roles.ranks(comm.roles.names[0])) if sliced else 1
        self._part = comm.rank if sliced else 0
        self._writes = sliced or comm.leads
        self._number = 0

    def write(self, further: int, state: Mapping[str, Any]) -> None:
        """This rank's part of the save `further` numbers on from the last."""
        self._number += further
        if self._writes:
            save(self._folder, self._number, self._part, self._parts, self._replica, state)

    def write_last(self, state: Mapping[str, Any]) -> None:
        """The save at the end of the run. Collective over the world."""
        # Servers count for themselves: one may be a save ahead of the leader.
        self._number = int(self._comm.broadcast_bytes(str(self._number + 2).encode()))
        self.write(0, state)
        self._comm.barrier()

    def restore(self) -> dict[str, Any] | None:
        """Bring the replica to the newest save; the leader's `state`, or None if there is no save. Collective."""
        found = latest(self._folder) if self._comm.leads else None
        self._number = int(self._comm.broadcast_bytes(str(found or 0).encode()))
        if not self._number:
            return None
        trains_like_leader = self._comm.role == self._comm.roles.names[0]
        return restore(self._folder, self._number, self._replica, self._part if trains_like_leader else None)


def save(folder: Path, number: int, part: int, parts: int, replica: Replica, state: Mapping[str, Any]) -> None:
    """Write one part of save `number`; the save counts once all its parts are there.

    Args:
        folder: OUT/checkpoint.
        number: of the save, growing through the run.
        part, parts: which of how many.
        replica: what to save; its `part` of the parameters.
        state: JSON values: how far the run is.
    """
    target = folder / f"{number:06d}" / _name(part, parts)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(".tmp")
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in _tensors(replica).items()}
    save_file(tensors, temporary, {"state": json.dumps(state)})
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, target)
    if part == 0:
        for old in sorted(_complete(folder))[:-_KEPT]:
            shutil.rmtree(folder / f"{old:06d}")


def latest(folder: Path) -> int | None:
    """Number of the newest save whose parts are all there; None if there is none."""
    return max(_complete(folder), default=None)


def restore(folder: Path, number: int, replica: Replica, part: int | None) -> dict[str, Any]:
    """Bring a replica to a save.

    Args:
        folder, number: which save.
        replica: takes over all parameters and buffers.
        part: whose optimizer and tables it takes over too; None: nobody's.
    Returns:
        what `save` was given as `state` for the first part.
    Raises:
        UserError: the save is of another model, or of another number of parts.
    """
    paths = sorted((folder / f"{number:06d}").glob("part-*.safetensors"))
    loaded = [_read(path) for path in paths]
    params = torch.cat([tensors["params"] for tensors, _ in loaded])
    if params.shape != replica.params.shape:
        raise UserError(
            f"{paths[0]} holds {params.numel()} parameters, this model has {replica.params.numel()}: resume with the "
            "settings the run was started with (config.yaml in its folder)"
        )
    replica.params.copy_(params)
    replica.load_float_buffers(loaded[0][0]["buffers"])
    if part is not None:
        if part >= len(loaded) or loaded[part][0]["params"].shape != replica.params[replica.part].shape:
            raise UserError(f"{folder} was saved by {len(loaded)} ranks; resume with as many servers")
        _restore_own(replica, loaded[part][0])
    return loaded[0][1]


def _tensors(replica: Replica) -> dict[str, Tensor]:
    """Everything of a replica that must survive, by name."""
    named = {"params": replica.params[replica.part], "buffers": replica.float_buffers}
    named |= {f"table/{name}": table for name, table in replica.tables.items()}
    for index, state in replica.optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if value is not None:
                named[f"optimizer/{index}/{name}"] = torch.as_tensor(value)
    return named


def _restore_own(replica: Replica, tensors: Mapping[str, Tensor]) -> None:
    replica.tables.update({n.removeprefix("table/"): t for n, t in tensors.items() if n.startswith("table/")})
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer/"):
            _, index, key = name.split("/", 2)
            state.setdefault(int(index), {})[key] = tensor
    groups = replica.optimizer.state_dict()["param_groups"]
    replica.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["state"])  # noqa: SIM118


def _name(part: int, parts: int) -> str:
    return f"part-{part:05d}-of-{parts:05d}.safetensors"


def _complete(folder: Path) -> list[int]:
    saves = []
    for save in folder.glob("[0-9]*"):
        present = [path.name for path in save.glob("part-*.safetensors")]
        parts = int(present[0].rsplit("-", 1)[1].split(".")[0]) if present else 0
        if parts and len(present) == parts:
            saves.append(int(save.name))
    return saves
