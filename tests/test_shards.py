"""Shard folders: written whole or not at all, read exactly, refused with one clear sentence."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from hvdist import Shards, UserError
from hvdist.manifest import read_manifest
from hvdist.prepare import Packing, Table, cut, write_folders
from hvdist.shards import Stream


def write(out: Path, rows: int, **options) -> Table:
    x = np.arange(rows * 6, dtype=np.float32).reshape(rows, 2, 3)
    table = Table(x, np.arange(rows) % 3)
    write_folders(out, {"train": table}, "a test", Packing(**options))
    return table


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "out", 20, shards=3)
    return tmp_path / "out" / "train"


@pytest.mark.parametrize("shuffle", ["global", "local", "none"])
@pytest.mark.parametrize(("rows", "shards"), [(1, 1), (1, 4), (7, 3), (64, 8), (65, 8), (100, 1)])
def test_rows_are_exact_for_any_number_of_rows_and_shards(tmp_path: Path, rows: int, shards: int, shuffle: str) -> None:
    table = write(tmp_path / "out", rows, shards=shards, shuffle=shuffle, seed=3)
    folder = tmp_path / "out" / "train"
    manifest = read_manifest(folder)
    sizes = [file.rows for file in manifest.files]
    assert sum(sizes) == manifest.rows == rows
    assert max(sizes) - min(sizes) <= 1
    seen = []
    for file in manifest.files:
        with h5py.File(folder / file.name) as handle:
            source = handle["row"][:]
            assert (handle["x"][:] == table.x[source]).all()
            assert (handle["y"][:] == table.y[source]).all()
            seen += source.tolist()
    assert sorted(seen) == list(range(rows))
    if shuffle == "none":
        assert seen == list(range(rows))
    batch = Shards(folder).rows(range(rows))
    assert (batch.x.numpy() == table.x[seen]).all()
    assert (batch.y.numpy() == table.y[seen]).all()


def test_global_shuffle_crosses_files_and_local_does_not() -> None:
    local = cut(12, 3, "local", seed=0)
    assert [sorted(piece) for piece in local] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert local[0].tolist() != [0, 1, 2, 3]
    crossing = cut(1200, 3, "global", seed=0)
    assert all(len(set(piece // 400)) == 3 for piece in crossing)
    assert [piece.tolist() for piece in cut(12, 3, "global", 5)] == [
        piece.tolist() for piece in cut(12, 3, "global", 5)
    ]


def test_the_manifest_tells_what_is_inside(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["rows"] == 20
    assert manifest["classes"] == {"0": 7, "1": 7, "2": 6}
    assert manifest["arrays"]["x"] == {"dtype": "float32", "shape": [2, 3]}
    assert manifest["source"] == "a test"
    names = [f"shard-0000{place}-of-00003.h5" for place in range(3)]
    assert [file["name"] for file in manifest["files"]] == names
    for file in manifest["files"]:
        digest = subprocess.run(["sha256sum", folder / file["name"]], capture_output=True, text=True, check=True).stdout
        assert digest.split()[0] == file["sha256"]


@pytest.mark.parametrize("compression", [None, "gzip", "lzf"])
def test_rows_in_any_order_with_duplicates(tmp_path: Path, compression: str | None) -> None:
    table = write(tmp_path / "out", 50, shards=4, shuffle="none", compression=compression)
    shards = Shards(tmp_path / "out" / "train")
    wanted = [49, 0, 7, 7, 7, 13, 12, 0]
    batch = shards.rows(wanted)
    assert (batch.x.numpy() == table.x[wanted]).all()
    assert (batch.y.numpy() == table.y[wanted]).all()
    assert batch.positions.tolist() == wanted
    assert shards.rows(torch.tensor([3])).positions.tolist() == [3]
    assert len(shards.rows([]).y) == 0


@pytest.mark.parametrize("bad", [-1, 20])
def test_a_row_that_does_not_exist_is_refused(folder: Path, bad: int) -> None:
    with pytest.raises(IndexError, match=f"no row {bad}: .* has rows 0 to 19"):
        Shards(folder).rows([0, bad])


@pytest.mark.parametrize("order", ["global", "local"])
def test_batches_are_the_rows_they_say(folder: Path, order: str) -> None:
    shards = Shards(folder, order=order, seed=1)  # type: ignore[arg-type]
    batches = list(shards.batches(8, epoch=0))
    assert [len(batch.y) for batch in batches] == [8, 8, 4] == [batch.total for batch in batches]
    assert len(batches) == shards.steps(8)
    for batch in batches:
        again = shards.rows(batch.positions)
        assert torch.equal(again.x, batch.x)
        assert torch.equal(again.y, batch.y)
    assert sorted(torch.cat([batch.positions for batch in batches]).tolist()) == list(range(20))


def test_a_stream_goes_from_epoch_to_epoch_and_resumes(folder: Path) -> None:
    shards = Shards(folder)
    stream = Stream(shards, 8)
    first = [next(stream) for _ in range(7)]
    assert (stream.epoch, stream.read) == (2, 8)
    resumed = Stream(shards, 8, 1, 8)
    for batch in first[4:]:
        assert torch.equal(next(resumed).positions, batch.positions)


def test_writing_refuses_to_overwrite_without_force(tmp_path: Path) -> None:
    write(tmp_path / "out", 20)
    with pytest.raises(UserError, match="out exists; give --force"):
        write(tmp_path / "out", 30)
    assert len(Shards(tmp_path / "out" / "train")) == 20
    write(tmp_path / "out", 30, force=True)
    assert len(Shards(tmp_path / "out" / "train")) == 30
    assert os.listdir(tmp_path) == ["out"]


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "out", 20)

    def fails(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("hvdist.prepare._write_last", fails)
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path / "out", 30, force=True)
    assert len(Shards(tmp_path / "out" / "train")) == 20
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros((3, 2)), np.zeros(2, int), "x has 3 rows and y has 2"),
        (np.zeros((0, 2)), np.zeros(0, int), "at least 1"),
        (np.zeros((2, 2)), np.zeros(2), "integers from 0; got float64"),
        (np.zeros((2, 2)), np.array([0, -1]), "integers from 0"),
        (np.array([["a"], ["b"]]), np.zeros(2, int), "x holds numbers"),
    ],
)
def test_senseless_tables_are_refused(x: np.ndarray, y: np.ndarray, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Table(x, y)


def rewrite(path: Path, **arrays: np.ndarray) -> None:
    """Replace arrays of a shard, keeping the manifest's size of the file true."""
    with h5py.File(path, "r+") as handle:
        for name, array in arrays.items():
            del handle[name]
            handle[name] = array
    update_size(path)


def update_size(path: Path) -> None:
    manifest = path.parent / "manifest.json"
    fields = json.loads(manifest.read_text())
    for file in fields["files"]:
        if file["name"] == path.name:
            file["bytes"] = path.stat().st_size
    manifest.write_text(json.dumps(fields))


def missing(folder: Path) -> None:
    (folder / "shard-00001-of-00003.h5").unlink()


def truncated(folder: Path) -> None:
    path = folder / "shard-00001-of-00003.h5"
    os.truncate(path, path.stat().st_size // 2)


def not_hdf5(folder: Path) -> None:
    path = folder / "shard-00001-of-00003.h5"
    path.write_bytes(b"x" * path.stat().st_size)


def wrong_dtype(folder: Path) -> None:
    rewrite(folder / "shard-00001-of-00003.h5", x=np.zeros((7, 2, 3), np.float64))


def wrong_rows(folder: Path) -> None:
    rewrite(folder / "shard-00001-of-00003.h5", y=np.zeros(6, np.int64))


def no_array(folder: Path) -> None:
    path = folder / "shard-00001-of-00003.h5"
    with h5py.File(path, "r+") as handle:
        del handle["y"]
    update_size(path)


def external_link(folder: Path) -> None:
    path = folder / "shard-00001-of-00003.h5"
    with h5py.File(path, "r+") as handle:
        del handle["x"]
        handle["x"] = h5py.ExternalLink("/etc/passwd", "x")
    update_size(path)


def soft_link(folder: Path) -> None:
    path = folder / "shard-00001-of-00003.h5"
    with h5py.File(path, "r+") as handle:
        handle.move("y", "hidden")
        handle["y"] = h5py.SoftLink("/hidden")
    update_size(path)


def external_storage(folder: Path) -> None:
    path = folder / "shard-00001-of-00003.h5"
    with h5py.File(path, "r+") as handle:
        del handle["y"]
        handle.create_dataset("y", (7,), np.int64, external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)])
    update_size(path)


def rows_do_not_add_up(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rows": 21}))


def no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def broken_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": 1, "rows"')


def foreign_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[1, 2]")


def newer_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (missing, "shard-00001-of-00003.h5 is missing"),
        (truncated, "truncated or replaced"),
        (not_hdf5, "not a readable HDF5 file"),
        (wrong_dtype, "array 'x' is float64 (7, 2, 3), the manifest says float32 (7, 2, 3)"),
        (wrong_rows, "array 'y' is int64 (6,), the manifest says int64 (7,)"),
        (no_array, "array 'y' is missing"),
        (external_link, "array 'x' is a link (ExternalLink)"),
        (soft_link, "array 'y' is a link (SoftLink)"),
        (external_storage, "'y' is not a dataset that holds its own rows"),
        (rows_do_not_add_up, "the files do not add up to 21 rows"),
        (no_manifest, "has no manifest.json; its preparation did not finish"),
        (broken_manifest, "is not a shard manifest"),
        (foreign_manifest, "is not a shard manifest"),
        (newer_manifest, "has format 2; this hvdist reads up to 1: upgrade it"),
        (no_folder, "no shard folder"),
    ],
)
def test_a_bad_folder_gets_one_clear_sentence(folder: Path, damage, message: str) -> None:
    damage(folder)
    with pytest.raises(UserError) as error:
        Shards(folder)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_parent_of_a_shard_folder_is_pointed_one_down(folder: Path) -> None:
    with pytest.raises(UserError, match="did you mean .*train"):
        Shards(folder.parent)


def test_an_unknown_order_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="order is global or local, got 'random'"):
        Shards(folder, order="random")  # type: ignore[arg-type]


def test_readers_survive_fork(folder: Path) -> None:
    shards = Shards(folder)
    before = shards.rows([5]).x
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(shards.rows([5]).x, before) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_reading_needs_no_mpi(folder: Path) -> None:
    code = (
        f"import sys; from hvdist import Shards; Shards({str(folder)!r}).rows([0]); assert 'mpi4py' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
