"""Who reads which row when: nothing lost, nothing twice, all ranks in step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdist.order import PLANS, global_plan, local_plan

SHAPES = {"rows": st.integers(1, 200), "readers": st.integers(1, 9), "batch": st.integers(1, 40)}


@pytest.mark.parametrize("order", PLANS)
@given(**SHAPES, seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_every_row_is_read_once_and_all_take_the_same_steps(
    order: str, rows: int, readers: int, batch: int, seed: int, epoch: int
) -> None:
    plans = [PLANS[order](rows, readers, reader, batch, seed, epoch) for reader in range(readers)]
    assert sorted(np.concatenate([plan.positions for plan in plans])) == list(range(rows))
    sizes = np.stack([plan.sizes for plan in plans])
    assert (sizes <= batch).all()
    for plan in plans:
        assert len(plan.positions) == plan.sizes.sum()
        assert (plan.totals == sizes.sum(axis=0)).all()
        assert (plan.totals > 0).all()


@given(**SHAPES, epoch=st.integers(0, 3))
def test_global_order_gives_a_step_the_same_rows_on_any_number_of_ranks(
    rows: int, readers: int, batch: int, epoch: int
) -> None:
    alone = global_plan(rows, 1, 0, batch * readers, 7, epoch)
    shared = [global_plan(rows, readers, reader, batch, 7, epoch) for reader in range(readers)]
    assert (alone.totals == shared[0].totals).all()
    for step, end in enumerate(np.cumsum(alone.sizes)):
        together = [row for plan in shared for row in _of_step(plan, step)]
        assert together == alone.positions[end - alone.sizes[step] : end].tolist()


@given(**SHAPES, seed=st.integers(0, 5))
def test_epochs_and_seeds_have_orders_of_their_own(rows: int, readers: int, batch: int, seed: int) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return global_plan(rows, 1, 0, batch, seed, epoch).positions.tolist()

    assert order(seed, 0) == order(seed, 0)
    if rows > 20:
        assert order(seed, 0) != order(seed, 1)
        assert order(seed, 0) != order(seed + 1, 0)


@given(**SHAPES, steps=st.integers(0, 5))
def test_starting_later_is_going_on(rows: int, readers: int, batch: int, steps: int) -> None:
    for order, plan in PLANS.items():
        for reader in range(readers):
            whole = plan(rows, readers, reader, batch, 3, 1)
            read = int(whole.totals[:steps].sum())
            rest = plan(rows, readers, reader, batch, 3, 1, start=read)
            if order == "local" and steps > np.argmax(np.append(whole.totals < batch * readers, True)):
                continue  # local order goes on after full steps only
            assert rest.positions.tolist() == whole.positions[whole.sizes[:steps].sum() :].tolist()
            assert rest.totals.tolist() == whole.totals[steps:].tolist()


def test_local_order_keeps_every_reader_to_its_own_contiguous_rows() -> None:
    own = [sorted(local_plan(10, 3, reader, 2, 0, epoch).positions) for reader in range(3) for epoch in (0, 1)]
    assert own == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5], [6, 7, 8, 9], [6, 7, 8, 9]]


def test_a_reader_without_rows_takes_part_in_the_last_step() -> None:
    # 5 rows, batches of 2 on 2 readers: steps of 4 and 1
    sizes = [global_plan(5, 2, reader, 2, 0, 0).sizes.tolist() for reader in range(2)]
    assert sizes == [[2, 1], [2, 0]]


def _of_step(plan, step: int) -> list[int]:
    end = plan.sizes[: step + 1].sum()
    return plan.positions[end - plan.sizes[step] : end].tolist()
