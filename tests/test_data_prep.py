"""The scripts of data_prep/, run as people run them."""

from __future__ import annotations

import gzip
import http.server
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import run

from hvdist import Shards

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape) + array.tobytes()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Four IDX files of 20 and 7 small images."""
    folder = tmp_path / "idx"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for prefix, rows in (("train", 20), ("t10k", 7)):
        images = generator.integers(0, 256, (rows, 28, 28), dtype=np.uint8)
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(np.arange(rows, dtype=np.uint8) % 10))
    return folder


def test_fashion_mnist_from_a_folder(tiny: Path, tmp_path: Path) -> None:
    done = run(
        "data_prep/fashion_mnist.py", "--out", tmp_path / "out", "--source", tiny, "--shards", "3", "--seed", "5"
    )
    assert done.returncode == 0, done.stderr
    assert "20 train rows, 7 test rows, in 3 shards each" in done.stdout
    shards = Shards(tmp_path / "out" / "train")
    assert (len(shards), shards.shape, shards.classes) == (20, (1, 28, 28), 10)
    assert shards.manifest.arrays["x"].dtype == "uint8"
    images = gzip.decompress((tiny / "train-images-idx3-ubyte.gz").read_bytes())[16:]
    stored = {bytes(row.numpy().tobytes()) for row in shards.rows(range(20)).x}
    assert stored == {images[start : start + 784] for start in range(0, 20 * 784, 784)}
    again = run("data_prep/fashion_mnist.py", "--out", tmp_path / "out", "--source", tiny)
    assert again.returncode == 1
    assert again.stderr.strip().endswith("exists; give --force to replace it, or another --out")
    assert run("data_prep/fashion_mnist.py", "--out", tmp_path / "out", "--source", tiny, "--force").returncode == 0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t10k-labels-idx1-ubyte", b"\0\0\x08\x01\0\0\0\x09ab", "not an IDX file of bytes, or it is truncated"),
        ("t10k-labels-idx1-ubyte", b"", "not an IDX file of bytes"),
        ("train-images-idx3-ubyte.gz", b"\x1f\x8b\x08 truncated", "is not a whole gzip file"),
        ("t10k-labels-idx1-ubyte", None, "--source is the folder of the four IDX files"),
    ],
)
def test_bad_files_get_one_sentence(tiny: Path, tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    (tiny / name).unlink()
    if content is not None:
        (tiny / name).write_bytes(content)
    done = run("data_prep/fashion_mnist.py", "--out", tmp_path / "out", "--source", tiny)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A web server of this machine's, serving tmp_path/www."""
    (tmp_path / "www").mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(tmp_path / "www"))  # type: ignore[misc]

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{one.server_port}"
        one.shutdown()


# The scripts' own module, so that the download can be tried where Debian's package is installed.
DOWNLOAD = """
import sys, pathlib
sys.path.insert(0, "data_prep")
import fashion_mnist
fashion_mnist.DEBIAN = pathlib.Path("/nowhere")
from hvdist.flags import run
run(fashion_mnist.fashion_mnist)
"""


def test_the_download_is_checked(tmp_path: Path, server: str) -> None:
    for name in FILES:
        (tmp_path / "www" / f"{name}.gz").write_bytes(gzip.compress(b"not Fashion-MNIST"))
    done = run("-c", DOWNLOAD, "--out", tmp_path / "out", "--url", server)
    assert done.returncode == 1
    assert "is not Fashion-MNIST: sha256" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(
    not Path("/usr/share/datasets/fashion-mnist").is_dir(), reason="needs Debian's dataset-fashion-mnist"
)
def test_the_download_of_the_real_thing(tmp_path: Path, server: str) -> None:
    for name in FILES:
        (tmp_path / "www" / f"{name}.gz").symlink_to(f"/usr/share/datasets/fashion-mnist/{name}.gz")
    done = run("-c", DOWNLOAD, "--out", tmp_path / "out", "--url", server + "/")
    assert done.returncode == 0, done.stderr
    assert (len(Shards(tmp_path / "out" / "train")), len(Shards(tmp_path / "out" / "test"))) == (60_000, 10_000)


def test_no_network_is_said_with_the_ways_out(tmp_path: Path) -> None:
    done = run("-c", DOWNLOAD, "--out", tmp_path / "out", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    for way in ("apt-get install dataset-fashion-mnist", "cannot be fetched", "--source"):
        assert way in done.stderr


def test_digits(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    from sklearn.datasets import load_digits

    done = run("data_prep/digits.py", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    train, test = (Shards(tmp_path / "out" / name) for name in ("train", "test"))
    assert (len(train), len(test), train.shape, train.classes) == (1500, 297, (1, 8, 8), 10)
    rows = [*train.rows(range(1500)).x, *test.rows(range(297)).x]
    assert {row.numpy().tobytes() for row in rows} == {
        (image / 16).astype(np.float32).tobytes() for image in load_digits().images
    }


def test_arrays_from_one_file_or_several(tmp_path: Path) -> None:
    x, y = np.arange(60, dtype=np.float32).reshape(20, 3), np.arange(20) % 4
    np.savez(tmp_path / "both.npz", x=x, y=y, x_test=x[:5], y_test=y[:5])
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    given = run("data_prep/arrays.py", "--out", tmp_path / "given", "--npz", tmp_path / "both.npz")
    assert given.returncode == 0, given.stderr
    assert (len(Shards(tmp_path / "given" / "train")), len(Shards(tmp_path / "given" / "test"))) == (20, 5)
    split = run(
        "data_prep/arrays.py", "--out", tmp_path / "split", "--x", tmp_path / "x.npy", "--y", tmp_path / "y.npy",
        "--test-fraction", "0.25",
    )  # fmt: skip
    assert split.returncode == 0, split.stderr
    parts = [Shards(tmp_path / "split" / name) for name in ("train", "test")]
    assert [len(part) for part in parts] == [15, 5]
    rows = np.concatenate([part.rows(range(len(part))).x.numpy() for part in parts])
    assert sorted(rows[:, 0].tolist()) == x[:, 0].tolist()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give --npz FILE, or --x and --y"),
        (["--npz", "nowhere.npz"], "nowhere.npz does not exist"),
        (["--npz", "pickled.npz"], "not a .npy or .npz file of plain numbers"),
        (["--npz", "named.npz"], "has the arrays images; x and y are needed"),
        (["--x", "x.npy", "--y", "x.npy", "--test_fraction", "0"], "0 test rows of 4 leave none on one side"),
    ],
)
def test_arrays_that_cannot_be_used_are_said(flags: list[str], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "pickled.npz", x=np.array([{}], dtype=object), y=np.array([{}], dtype=object))
    np.savez(tmp_path / "named.npz", images=np.zeros(3))
    np.save(tmp_path / "x.npy", np.zeros(4, np.int64))
    words = [tmp_path / word if "." in word and word[0] != "-" and word != "0" else word for word in flags]
    done = run("data_prep/arrays.py", "--out", tmp_path / "out", *words)
    assert done.returncode == 1, done.stderr
    assert message in done.stderr
