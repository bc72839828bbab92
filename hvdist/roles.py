"""Who plays what: an algorithm names its seats, and they are filled with ranks.

Rank 0 always holds the first seat and *leads*: it evaluates, records and saves.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdist.errors import UserError


@dataclass(frozen=True)
class Seat:
    """A role and how many ranks hold it; `ranks=None` takes all that are left, at least `least`."""

    role: str
    ranks: int | None = None
    least: int = 1

    def __str__(self) -> str:
        return f"{self.role} >= {self.least}" if self.ranks is None else f"{self.role} {self.ranks}"


@dataclass(frozen=True)
class Roles:
    """The role of every rank: `names[rank]`."""

    names: tuple[str, ...]

    @classmethod
    def fill(cls, seats: tuple[Seat, ...], ranks: int) -> Roles:
        """Hand out ranks 0, 1, ... in the order of the seats.

        Args:
            seats: the algorithm's seats; at most one takes "all that are left".
            ranks: size of the world, at least 1.
        Raises:
            UserError: too few or too many ranks; the message tells how many to start.
        >>> str(Roles.fill((Seat("server", 1), Seat("worker")), 4))
        'server 0, worker 1-3'
        """
        fixed = sum(seat.ranks or 0 for seat in seats)
        least = fixed + sum(seat.least for seat in seats if seat.ranks is None)
        elastic = any(seat.ranks is None for seat in seats)
        if ranks < least or (ranks > least and not elastic):
            wanted = ", ".join(map(str, seats))
            cure = f"start {'at least' if elastic else 'exactly'} {least}"
            number = "1 rank" if ranks == 1 else f"{ranks} ranks"
            raise UserError(f"{number} cannot hold the roles: {wanted}; {cure}")
        left = ranks - fixed
        return cls(tuple(seat.role for seat in seats for _ in range(left if seat.ranks is None else seat.ranks)))

    def ranks(self, role: str) -> tuple[int, ...]:
        """The ranks that play `role`, ascending; empty if nobody does."""
        return tuple(rank for rank, name in enumerate(self.names) if name == role)

    def __str__(self) -> str:
        return ", ".join(f"{role} {_span(self.ranks(role))}" for role in dict.fromkeys(self.names))


def _span(ranks: tuple[int, ...]) -> str:
    """Seats are contiguous, so first and last say it all."""
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
