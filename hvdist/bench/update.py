"""`hvdist bench update`."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hvdist.bench.timing import Timed, medians, print_ratios
from hvdist.errors import UserError
from hvdist.update import Compensation, has_compiler

_DECAY, _EPSILON = 0.95, 1e-7

# One pass over the same vectors, with the least arithmetic: what memory allows.
_TRAFFIC = """
#include <stddef.h>
#include <math.h>
void constant(float *restrict w, const float *restrict g, const float *restrict b, float lr, float lam, size_t n) {
    #pragma omp simd
    for (size_t i = 0; i < n; i++) w[i] -= lr * (g[i] + lam * g[i] * g[i] * (w[i] - b[i]));
}
void adaptive(float *restrict w, const float *restrict g, const float *restrict b, float *restrict s,
              float lr, float lam, size_t n) {
    #pragma omp simd
    for (size_t i = 0; i < n; i++) {
        s[i] = 0.95f * s[i] + 0.05f * g[i] * g[i];
        w[i] -= lr * (g[i] + lam / sqrtf(s[i] + 1e-7f) * g[i] * g[i] * (w[i] - b[i]));
    }
}
"""


def update(parameters: int = 10_000_000, rounds: int = 15) -> None:
    """Time the server's update beside a C loop with the same memory traffic, on one thread.

    Args:
        parameters: Length of the vector, float32.
        rounds: Of which the median is taken.
    """
    torch.set_num_threads(1)
    print(f"update of {parameters:,} float32 parameters, 1 thread, medians of {rounds} interleaved rounds\n")
    params, grad, backup, squares = torch.randn(4, parameters)
    loops = _c_loops()
    for form, mean_square in (("constant", None), ("adaptive", squares.square_())):
        vectors = [vector for vector in (params, grad, backup, mean_square) if vector is not None]
        timed: dict[str, Timed] = {"floor": functools.partial(_call, loops[form], vectors)}
        timed["naive"] = functools.partial(_naive, params, grad, backup, mean_square)
        for kernel in ("compiled", "chunked") if has_compiler() else ("chunked",):
            rule = Compensation(2.0, mean_square is not None, _DECAY, _EPSILON, kernel)
            timed[kernel] = functools.partial(rule.sgd_, params, grad, backup, mean_square, 1e-6)
            timed[kernel]()  # compiles
        named = {f"{form}, {name}": seconds for name, seconds in medians(timed, rounds).items()}
        chunked_bar = "bar 4.0" if mean_square is not None else "bar 2.4"
        print_ratios(named, f"{form}, floor", {f"{form}, compiled": "bar 1.2", f"{form}, chunked": chunked_bar})


def _naive(params: Tensor, grad: Tensor, backup: Tensor, mean_square: Tensor | None) -> None:
    """The formula as one would type it."""
    strength: Tensor | float = 2.0
    if mean_square is not None:
        mean_square.copy_(_DECAY * mean_square + (1 - _DECAY) * grad * grad)
        strength = 2.0 / torch.sqrt(mean_square + _EPSILON)
    params.copy_(params - 1e-6 * (grad + strength * grad * grad * (params - backup)))


def _c_loops() -> dict[str, Callable[..., object]]:
    compiler = next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        raise UserError("the floor is a C loop: this bench needs a C compiler; install gcc")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "traffic.c", Path(folder) / "traffic.so"
        source.write_text(_TRAFFIC)
        flags = ["-O3", "-march=native", "-ffast-math", "-fopenmp-simd", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
        loaded = ctypes.CDLL(str(library))
    return {"constant": loaded.constant, "adaptive": loaded.adaptive}


def _call(loop: Callable[..., object], vectors: list[Tensor]) -> None:
    pointers = [ctypes.c_void_p(vector.data_ptr()) for vector in vectors]
    loop(*pointers, ctypes.c_float(1e-6), ctypes.c_float(2.0), ctypes.c_size_t(vectors[0].numel()))
