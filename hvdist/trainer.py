"""The ready-made loop: one call trains, evaluates, records, saves and resumes, with any algorithm."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hvdist.algorithm import Algorithm, drive
from hvdist.checkpoint import Saves
from hvdist.comm import Comm, init
from hvdist.driver import Driver
from hvdist.leader import Leader
from hvdist.models import build
from hvdist.progress import Progress
from hvdist.questions import EVERYONE, Answer, Gradient, Question, Update
from hvdist.record import Clock
from hvdist.replica import Replica
from hvdist.run_folder import CHECKPOINT, check, clear, write_config
from hvdist.schedule import Schedule
from hvdist.settings import Training
from hvdist.shards import Shards, Stream
from hvdist.task import Task

# How to start a run is no part of what the run is.
_NOT_IN_CONFIG = ("resume", "overwrite")


def train(
    algorithm: Algorithm,
    settings: Training,
    schedule: Schedule = Schedule(),
    make_task: Callable[[nn.Module], Task] = Task,
) -> dict[str, Any] | None:
    """Train a model and keep the run in a folder. Collective over the world.

    Args:
        algorithm: with its settings, the same on every rank.
        settings: of the run.
        schedule: of the learning rate.
        make_task: makes what answers for the model; give a subclass of `Task` to answer a question differently.
    Returns:
        on the leader, what it wrote to summary.json; None on the others.
    Raises:
        UserError: whatever the user can mend: folders, names, ranks; see the message.
    """
    comm = init(algorithm, settings.seed)
    run = _Run(algorithm, settings, schedule, make_task, comm)
    run.play()
    summary = run.finish()
    comm.close()
    return summary


class _Run:
    """One rank's part of a run."""

    def __init__(
        self,
        algorithm: Algorithm,
        settings: Training,
        schedule: Schedule,
        make_task: Callable[[nn.Module], Task],
        comm: Comm,
    ) -> None:
        self.algorithm, self.settings, self.comm = algorithm, settings, comm
        out = Path(settings.out)
        if comm.leads:
            check(out, algorithm.name, settings.resume, settings.overwrite)
        train, test = (
            Shards(Path(settings.data) / name, comm, order=settings.order, seed=settings.seed)
            for name in ("train", "test")
        )
        model = build(settings.model, train.shape, train.classes, **settings.model_args)
        self.task = make_task(model)
        self.replica = Replica(model, settings.make_optimizer(model))
        algorithm.prepare(comm, self.replica)
        self.progress = Progress(len(train), settings.epochs, settings.updates, schedule)
        self.saves = Saves(out / CHECKPOINT, comm, self.replica)
        seconds, self.turn, stream = self._where_to_go_on(train)
        self.driver = Driver(comm, self.replica)
        self.driver.start(stream, self.progress)
        self.clock = Clock(comm.now, seconds)
        self._looks, self._saved = self._due(settings.eval_every), self._due(settings.checkpoint_every)
        self.leader = None
        if comm.leads:
            if settings.overwrite:
                clear(out)
            fields = {**asdict(algorithm), **asdict(settings), **asdict(schedule)}  # type: ignore[call-overload]
            write_config(out, algorithm.name, {k: v for k, v in fields.items() if k not in _NOT_IN_CONFIG})
            self.leader = Leader(algorithm.name, settings, self.driver, self.task, test, self.clock)

    def play(self) -> None:
        """This rank's role, to its end."""
        if self.leader:
            self.leader.begin()
        self.comm.barrier()
        self.clock.start()
        if not self.progress.done:
            drive(self.algorithm.play(self.comm, self.replica), self.answer)
        self.clock.stop()
        if self.leader:
            self.leader.evaluate()

    def answer(self, question: Question) -> Answer | bool:
        """Answer this rank's role."""
        return self.gradient(question) if isinstance(question, Gradient) else self.count(question)

    def gradient(self, question: Gradient) -> Answer:
        """Rows, backward pass, gradient."""
        self._reseed()
        batch = self.driver.begin(question)
        if len(batch.y):
            self.task.backward(batch, question.weights)
        return self.driver.end()

    def count(self, update: Update) -> bool:
        """Count an update; evaluate and save when it is time."""
        going = self.driver.count(update)
        if self.leader:
            self.leader.watch(update)
        if going and self._looks < (now := self._due(self.settings.eval_every)):
            self._looks = now
            with self.clock.pause():
                self.algorithm.collect(self.comm, self.replica)
                if self.leader:
                    self.leader.evaluate()
        if going and self._saved < (now := self._due(self.settings.checkpoint_every)):
            self.saves.write(now - self._saved, self._state())
            self._saved = now
            if self.leader:
                self.leader.saved()
        return going

    def finish(self) -> dict[str, Any] | None:
        """After the role: the last checkpoint, and the leader's summary."""
        self.saves.write_last(self._state())
        bytes_sent = int(self.comm.total(self.comm.bytes_sent))
        return self.leader.finish(bytes_sent, self.comm.library) if self.leader else None

    def _due(self, every_epochs: float) -> int:
        """How often something due every so many epochs should have happened by now; the same on ranks that count."""
        return int(self.progress.samples / (every_epochs * self.progress.rows))

    def _reseed(self) -> None:
        """What a step draws depends on the seed, the rank and its turn alone: nothing to save, nothing shared."""
        name = f"{self.settings.seed} {self.comm.rank} {self.turn}".encode()
        seed = int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "big")
        torch.default_generator.manual_seed(seed)
        self.replica.rng.manual_seed(seed + 1)
        self.turn += 1

    def _state(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "progress": self.progress.state(),
            "seconds": self.clock.seconds,
            "roles": list(self.comm.roles.names),
            "batch": settings.batch,
        }

    def _where_to_go_on(self, train: Shards) -> tuple[float, int, Stream]:
        """Training seconds, this rank's turn and its next batch: those of the last save, if that is to be resumed."""
        batch = self.settings.batch
        state = self.saves.restore() if self.settings.resume else None
        if state is None:
            return 0.0, 0, Stream(train, batch)
        self.progress.restore(state["progress"])
        turns = self.progress.turns
        if state["roles"] == list(self.comm.roles.names) and state["batch"] == batch:
            turn = turns[self.comm.rank] or turns[EVERYONE]
            epoch, step = divmod(turn, train.steps(batch))
            return state["seconds"], turn, Stream(train, batch, epoch, step * batch * train.readers)
        # other ranks or batches share the epoch now: go on behind the rows that were read, whoever read them
        epoch, read = divmod(self.progress.samples, len(train))
        return state["seconds"], self.progress.updates, Stream(train, batch, epoch, read)
