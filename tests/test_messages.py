from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdist.messages import HEADER_LENGTH, Message, pack_header, raw_bytes, tensors_of, unpack_header

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
TENSORS = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=8)).map(
        lambda kind: torch.zeros(kind[1], dtype=kind[0])
    ),
    max_size=4,
)


@given(TENSORS, st.integers(-1, 2**62), st.integers(0, 2**62))
def test_a_header_says_what_was_packed(tensors: list[torch.Tensor], version: int, samples: int) -> None:
    header = pack_header(tuple(tensors), version, samples)
    assert header.shape == (HEADER_LENGTH,)
    kinds, got_version, got_samples = unpack_header(header)
    assert kinds == [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    assert (got_version, got_samples) == (version, samples)


def test_a_strange_header_is_refused() -> None:
    header = pack_header((), 0, 0)
    header[0] += 1
    with pytest.raises(ValueError, match="same version of hvdist"):
        unpack_header(header)


def test_what_cannot_travel_is_refused_with_what_can() -> None:
    with pytest.raises(ValueError, match=r"complex64 of shape \(2,\) on cpu"):
        tensors_of(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="at most 8 dimensions"):
        tensors_of(torch.zeros([1] * 9))
    with pytest.raises(ValueError, match="at most 4 tensors, got 5"):
        tensors_of((torch.zeros(1),) * 5)


def test_strided_and_grad_requiring_tensors_travel_as_their_values() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    parameter = torch.nn.Parameter(torch.arange(3.0))
    for tensor in (matrix.t(), matrix[:, ::2], torch.ones(1).expand(5), parameter, torch.tensor(7.0)):
        (ready,) = tensors_of(tensor)
        assert ready.is_contiguous()
        assert not ready.requires_grad
        back = raw_bytes(ready).view(tensor.dtype).view(tensor.shape)
        assert torch.equal(back, tensor.detach())


def test_payload_is_what_was_sent() -> None:
    one, two = torch.ones(1), torch.zeros(2)
    assert Message(0, 1).payload is None
    assert Message(0, 1, (one,)).payload is one
    assert Message(0, 1, (one, two)).payload == (one, two)
