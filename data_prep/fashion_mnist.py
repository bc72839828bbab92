"""Fashion-MNIST (Xiao et al. 2017, arXiv:1708.07747) as shards."""

from __future__ import annotations

import gzip
import hashlib
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
from tqdm import tqdm

from hvdist.errors import UserError
from hvdist.flags import run
from hvdist.prepare import Packing, Table, write_folders

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
# sha256 of the unpacked files: the same whoever packed them.
SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
_UNSIGNED_BYTES = 0x08
_TIMEOUT_SECONDS = 20


def fashion_mnist(
    out: str,
    source: str | None = None,
    url: str = URL,
    packing: Packing = Packing(),
) -> None:
    """Write Fashion-MNIST's 60,000 training and 10,000 test images, 28 x 28 grey bytes, as shard folders.

    Args:
        out: Folder to write, with train and test inside.
        source: Folder of the four IDX files, packed or not. If not given: Debian's package dataset-fashion-mnist
            where it is installed, else a download.
        url: Where to download from.
        packing: How rows become files.
    """
    if source:
        files = {name: _packed_or_not(Path(source) / name) for name in SHA256}
    elif DEBIAN.is_dir():
        files = {name: _packed_or_not(DEBIAN / name) for name in SHA256}
    else:
        files = {name: _download(url.rstrip("/") + "/", name) for name in SHA256}
    tables = {
        folder: Table(
            _idx(files, f"{prefix}-images-idx3-ubyte")[:, None],  # one channel
            _idx(files, f"{prefix}-labels-idx1-ubyte"),
        )
        for folder, prefix in (("train", "train"), ("test", "t10k"))
    }
    write_folders(out, tables, f"Fashion-MNIST from {source or (DEBIAN if DEBIAN.is_dir() else url)}", packing)


def _packed_or_not(path: Path) -> bytes:
    packed = path.with_name(path.name + ".gz")
    if path.is_file():
        return path.read_bytes()
    if packed.is_file():
        return _unpacked(packed.read_bytes(), str(packed))
    raise UserError(f"neither {path} nor {packed} exists; --source is the folder of the four IDX files")


def _unpacked(data: bytes, whence: str) -> bytes:
    try:
        return gzip.decompress(data)
    except (OSError, EOFError) as error:
        raise UserError(f"{whence} is not a whole gzip file ({error}); fetch it again") from error


def _download(url: str, name: str) -> bytes:
    """Fetch one file, showing progress, and check it."""
    address = f"{url}{name}.gz"
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_SECONDS) as reply:
            total = int(reply.headers.get("Content-Length", 0)) or None
            with tqdm(total=total, desc=name, unit="B", unit_scale=True, disable=None) as bar:
                pieces = []
                while piece := reply.read(1 << 16):
                    pieces.append(piece)
                    bar.update(len(piece))
    except (urllib.error.URLError, OSError) as error:
        raise UserError(
            f"Fashion-MNIST is not at hand: {DEBIAN} does not exist (Debian and Ubuntu: apt-get install "
            f"dataset-fashion-mnist) and {address} cannot be fetched ({getattr(error, 'reason', error)}). Give the "
            "folder of its four IDX files with --source"
        ) from error
    data = _unpacked(b"".join(pieces), address)
    if (got := hashlib.sha256(data).hexdigest()) != SHA256[name]:
        raise UserError(f"{address} is not Fashion-MNIST: sha256 {got}, not {SHA256[name]}; try another --url")
    return data


def _idx(files: dict[str, bytes], name: str) -> np.ndarray:
    """An IDX file's array: two zero bytes, the dtype, the number of dimensions, their sizes, then the values."""
    data = files[name]
    dims = data[3] if len(data) > 3 and data[:3] == bytes([0, 0, _UNSIGNED_BYTES]) else 0
    shape = tuple(np.frombuffer(data, ">i4", dims, 4)) if len(data) >= 4 + 4 * dims else ()
    if dims != int(name.split("-idx")[1][0]) or len(data) != 4 + 4 * dims + int(np.prod(shape, dtype=np.int64)):
        raise UserError(f"{name} is not an IDX file of bytes, or it is truncated; fetch it again")
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dims).reshape(shape)


if __name__ == "__main__":
    run(fashion_mnist)
