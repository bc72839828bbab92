"""What a shard folder says of itself, `manifest.json`: written last, so a folder without one is not finished."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdist.errors import UserError

FORMAT = 1
NAME = "manifest.json"


@dataclass(frozen=True)
class Array:
    """One array of every shard: its numpy dtype and the shape of one row."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ShardFile:
    """One file: its rows, its size and its checksum."""

    name: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A shard folder's table of contents.

    Attributes:
        rows: of all files together.
        classes: label -> rows that bear it.
        arrays: name -> dtype and shape of one row.
        files: in order; a row's position counts through them.
        source: where the rows come from.
        shuffle, seed: how they were permuted when they were written.
        format: of this file and its shards.
    """

    rows: int
    classes: dict[int, int]
    arrays: dict[str, Array]
    files: tuple[ShardFile, ...]
    source: str
    shuffle: str
    seed: int
    format: int = FORMAT

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def loads(cls, text: str, where: Path) -> Manifest:
        """From JSON.

        Raises:
            UserError: not a manifest, or one of a newer format.
        """
        try:
            fields = json.loads(text)
            if fields["format"] > FORMAT:
                raise UserError(f"{where} has format {fields['format']}; this hvdist reads up to {FORMAT}: upgrade it")
            fields["classes"] = {int(label): count for label, count in fields["classes"].items()}
            fields["arrays"] = {name: Array(a["dtype"], tuple(a["shape"])) for name, a in fields["arrays"].items()}
            fields["files"] = tuple(ShardFile(**file) for file in fields["files"])
            return cls(**fields)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{where} is not a shard manifest ({error!r}); prepare the folder again") from error


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        UserError: no folder, no manifest, or not one.
    """
    where = folder / NAME
    if not folder.is_dir():
        raise UserError(f"no shard folder {folder}; make one with a script of data_prep/, such as fashion_mnist.py")
    if not where.is_file():
        inside = sorted(child.name for child in folder.iterdir() if (child / NAME).is_file())
        cure = f"did you mean {folder / inside[0]}?" if inside else "its preparation did not finish: run it again"
        raise UserError(f"{folder} has no {NAME}; {cure}")
    return Manifest.loads(where.read_text(), where)
