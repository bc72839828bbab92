"""A communicator worked by hand: what a role receives is laid out before, what it sends is kept."""

from __future__ import annotations

from collections import deque

import torch

from hvdist.algorithm import Algorithm
from hvdist.messages import Message, tensors_of
from hvdist.roles import Roles


class HandComm:
    """One rank, alone with its messages."""

    def __init__(self, algorithm: Algorithm, ranks: int, rank: int, inbox: list[Message] = []) -> None:  # noqa: B006
        self.rank = rank
        self.roles = Roles.fill(algorithm.seats, ranks)
        self.role = self.roles.names[rank]
        self.peers = self.roles.ranks(self.role)
        self.leads = rank == 0
        self.inbox = deque(inbox)
        self.sent: list[tuple[int, int, int, tuple[torch.Tensor, ...]]] = []

    def send(self, payload, to, tag, *, version=0, samples=0, lend=False) -> None:
        place = to if isinstance(to, int) else self.roles.ranks(to)[0]
        self.sent.append((place, tag, version, tuple(tensor.clone() for tensor in tensors_of(payload))))

    def recv(self, source=None, tag=None) -> Message:
        ranks = self.roles.ranks(source) if isinstance(source, str) else (source,)
        for message in self.inbox:
            if (source is None or message.source in ranks) and tag in (None, message.tag):
                self.inbox.remove(message)
                return message
        raise AssertionError(f"the role waits for tag {tag} from {source}, and nothing comes")

    def mean(self, tensor):
        return tensor
