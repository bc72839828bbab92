from __future__ import annotations

import torch

from hvdist.buffers import BufferPool, zeros


def test_a_buffer_is_lent_to_one_and_comes_back_when_forgotten() -> None:
    pool = BufferPool()
    first = pool.take(1000)
    address = first.data_ptr()
    second = pool.take(1000)
    assert second.data_ptr() != address
    del first
    assert pool.take(1000).data_ptr() == address


def test_any_view_keeps_a_buffer() -> None:
    pool = BufferPool()
    view = pool.take(1024).view(torch.float32).view(2, 128)[1]
    view.fill_(3.0)
    pool.take(1024).fill_(0)
    assert torch.equal(view, torch.full((128,), 3.0))


def test_numpy_views_keep_a_buffer_too() -> None:
    pool = BufferPool()
    array = pool.take(64).numpy()
    array[:] = 7
    pool.take(64).fill_(0)
    assert (array == 7).all()


def test_memory_is_aligned_and_zeroed() -> None:
    for length in (1, 1000, 2_000_001):
        vector = zeros(length)
        assert vector.shape == (length,)
        assert vector.data_ptr() % 64 == 0
        assert not vector.any()
    assert BufferPool().take(0).shape == (0,)
