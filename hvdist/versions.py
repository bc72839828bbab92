"""What is installed: for the record of a run, and for `hvdist info`."""

from __future__ import annotations

import platform
from importlib import metadata

PACKAGES = ("hvdist", "torch", "numpy", "h5py", "mpi4py", "horovod", "safetensors", "jsonargparse")


def versions() -> dict[str, str | None]:
    """Package -> version, None where it is not installed; and Python's."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
