"""What an algorithm is: seats, and one generator method for each role."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, ClassVar

from hvdist.messages import Communicator
from hvdist.questions import Question
from hvdist.replica import Replica
from hvdist.roles import Seat

Role = Generator[Question, Any, None]
"""One rank's part: it yields questions, is sent their answers, and calls the communicator for messages."""


class Algorithm:
    """Its role methods are named like the roles.

    Subclasses are frozen dataclasses whose fields are the settings. `prepare` runs before the training clock starts;
    `collect` brings the whole model to the leader before it is evaluated, at the same updates on every rank that counts
    updates; when its role has ended, the leader's replica is whole.
    """

    name: ClassVar[str]
    collective: ClassVar[tuple[str, ...]] = ()
    """Roles whose ranks call `comm.mean`."""

    @property
    def seats(self) -> tuple[Seat, ...]:
        """The roles, in the order in which ranks take them; the first seat leads."""
        raise NotImplementedError

    def play(self, comm: Communicator, replica: Replica) -> Role:
        """The generator of this rank's role."""
        role: Role = getattr(self, comm.role)(comm, replica)
        return role

    def prepare(self, comm: Communicator, replica: Replica) -> None:
        """Slow first steps (compiling, large allocations) of this rank's role."""

    def collect(self, comm: Communicator, replica: Replica) -> None:
        """Make the leader's replica whole."""


def drive(role: Role, answer: Callable[[Question], Any]) -> None:
    """Play a role to its end, answering each of its questions."""
    reply = None
    while True:
        try:
            question = role.send(reply)
        except StopIteration:
            return
        reply = answer(question)
