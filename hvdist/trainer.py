"""The ready-made loop: one call trains, evaluates, records, saves and resumes, with any algorithm."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

from hvdist.checkpoint import Saves
from hvdist.comm import Comm, init
from hvdist.driver import Driver
from hvdist.errors import UserError
from hvdist.leader import RECORD, SUMMARY, Leader
from hvdist.models import build
from hvdist.progress import Progress
from hvdist.questions import EVERYONE, Answer, Gradient, Question, Update, drive
from hvdist.record import Clock, write_text
from hvdist.replica import Replica
from hvdist.roles import Algorithm
from hvdist.schedule import Schedule
from hvdist.settings import Training
from hvdist.shards import Shards, Stream
from hvdist.task import Task

CONFIG = "config.yaml"
# How to start a run is no part of what the run is.
_NOT_IN_CONFIG = ("resume", "overwrite")


def train(algorithm: Algorithm, settings: Training, schedule: Schedule = Schedule()) -> dict[str, Any] | None:
    """Train a model and keep the run in a folder. Collective over the world.

    Args:
        algorithm: with its settings, the same on every rank.
        settings: of the run.
        schedule: of the learning rate.
    Returns:
        on the leader, what it wrote to summary.json; None on the others.
    Raises:
        UserError: whatever the user can mend: folders, names, ranks; see the message.
    """
    comm = init(algorithm, settings.seed)
    run = _Run(algorithm, settings, schedule, comm)
    run.play()
    summary = run.finish()
    comm.close()
    return summary


class _Run:
    """One rank's part of a run."""

    def __init__(self, algorithm: Algorithm, settings: Training, schedule: Schedule, comm: Comm) -> None:
        self.algorithm, self.settings, self.comm = algorithm, settings, comm
        train, test = (
            Shards(Path(settings.data) / name, comm, order=settings.order, seed=settings.seed)
            for name in ("train", "test")
        )
        model = build(settings.model, train.shape, train.classes, **settings.model_args)
        self.task = Task(model)
        self.replica = Replica(model, settings.make_optimizer(model))
        algorithm.prepare(comm, self.replica)
        if comm.leads:
            _open_folder(algorithm, settings, schedule)
        self.progress = Progress(len(train), settings.epochs, settings.updates, schedule)
        self.saves = Saves(Path(settings.out) / "checkpoint", comm, self.replica)
        resumed = self.saves.restore() if settings.resume else None
        self.turn, stream = 0, Stream(train, settings.batch)
        seconds = 0.0
        if resumed:
            self.progress.restore(resumed["progress"])
            seconds = resumed["seconds"]
            self.turn, stream = self._stream_from(resumed, train)
        self.driver = Driver(comm, self.replica)
        self.driver.start(stream, self.progress)
        self.clock = Clock(comm.now, seconds)
        self.leader = Leader(algorithm.name, settings, self.driver, self.task, test, self.clock) if comm.leads else None
        self._looks, self._saved = self._due(settings.eval_every), self._due(settings.checkpoint_every)

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

    def _stream_from(self, state: Mapping[str, Any], train: Shards) -> tuple[int, Stream]:
        """This rank's turn and its next batch, as a save left them."""
        turns, batch = self.progress.turns, self.settings.batch
        if state["roles"] == list(self.comm.roles.names) and state["batch"] == batch:
            turn = turns[self.comm.rank] or turns[EVERYONE]
            epoch, step = divmod(turn, train.steps(batch))
            return turn, Stream(train, batch, epoch, step * batch * train.readers)
        # other ranks or batches share the epoch now: go on behind the rows that were read, whoever read them
        epoch, read = divmod(self.progress.samples, len(train))
        return self.progress.updates, Stream(train, batch, epoch, read)


def _open_folder(algorithm: Algorithm, settings: Training, schedule: Schedule) -> None:
    """Make the run folder, with the effective settings inside."""
    out = Path(settings.out)
    headline = f"# hvdist train {algorithm.name} --config {out / CONFIG}"
    if (out / CONFIG).exists():
        _reopen(out, headline, settings)
    out.mkdir(parents=True, exist_ok=True)
    fields = {**asdict(algorithm), **asdict(settings), **asdict(schedule)}  # type: ignore[call-overload]
    kept = {name: value for name, value in fields.items() if name not in _NOT_IN_CONFIG}
    write_text(out / CONFIG, f"{headline}\n{yaml.safe_dump(kept, sort_keys=False)}")


def _reopen(out: Path, headline: str, settings: Training) -> None:
    """The folder holds a run: replace it, go on with it, or refuse."""
    if settings.overwrite:
        for name in (CONFIG, RECORD, SUMMARY):
            (out / name).unlink(missing_ok=True)
        for name in ("checkpoint", "tensorboard"):
            shutil.rmtree(out / name, ignore_errors=True)
    elif not settings.resume:
        raise UserError(
            f"{out} holds a run; give --resume to go on with it, --overwrite to replace it, or another --out"
        )
    elif (found := (out / CONFIG).read_text().splitlines()[0]).split()[:4] != headline.split()[:4]:
        raise UserError(f"{out} holds another run, started by {found.lstrip('# ')}; resume it as that algorithm")
