from __future__ import annotations

import pytest

from hvdist import ASGD, DCASGD, Sync, UserError
from hvdist.roles import Roles, Seat

SEATS = (Seat("server", 1), Seat("learner", 2), Seat("scorer"))


def test_ranks_are_seated_in_order() -> None:
    roles = Roles.fill(SEATS, 5)
    assert roles.names == ("server", "learner", "learner", "scorer", "scorer")
    assert roles.ranks("learner") == (1, 2)
    assert roles.ranks("nobody") == ()
    assert str(roles) == "server 0, learner 1-2, scorer 3-4"


def test_too_few_ranks_are_refused_with_the_number_to_start() -> None:
    with pytest.raises(UserError) as error:
        Roles.fill(SEATS, 3)
    assert str(error.value) == "3 ranks cannot hold the roles: server 1, learner 2, scorer >= 1; start at least 4"


def test_too_many_ranks_for_fixed_seats_are_refused() -> None:
    with pytest.raises(UserError, match=r"3 ranks cannot hold the roles: server 1, learner 1; start exactly 2"):
        Roles.fill((Seat("server", 1), Seat("learner", 1)), 3)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 1000])
def test_sync_runs_on_any_number_of_ranks(ranks: int) -> None:
    assert Roles.fill(Sync().seats, ranks).ranks("learner") == tuple(range(ranks))


def test_asgd_needs_a_worker_beside_its_servers() -> None:
    assert Roles.fill(ASGD(servers=2).seats, 5).names == ("server", "server", "worker", "worker", "worker")
    with pytest.raises(UserError, match="1 rank cannot hold the roles: server 1, worker >= 1; start at least 2"):
        Roles.fill(DCASGD().seats, 1)


@pytest.mark.parametrize(
    "settings",
    [{"servers": 0}, {"ahead": -1}, {"drift_every": 0}, {"strength": -1.0}, {"decay": 1.0}, {"epsilon": 0.0}],
)
def test_senseless_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(settings))):
        DCASGD(**settings)  # type: ignore[arg-type]
