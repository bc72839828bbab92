"""What the leading rank does beside its role: evaluate, write the record, show progress, sum up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hvdist.display import Display
from hvdist.driver import Driver
from hvdist.errors import UserError
from hvdist.questions import EVERYONE, Update
from hvdist.record import Clock, Record, write_json
from hvdist.run_folder import RECORD, SUMMARY, TENSORBOARD
from hvdist.settings import Training
from hvdist.shards import Shards
from hvdist.task import Task
from hvdist.versions import versions


class Leader:
    """The leader's eyes on a run.

    Args:
        name: of the algorithm.
        settings: of the run.
        driver, task: the leading rank's own.
        test: the test rows.
        clock: of the training seconds; above zero if the run was resumed.
    """

    def __init__(self, name: str, settings: Training, driver: Driver, task: Task, test: Shards, clock: Clock) -> None:
        self._name, self._driver, self._task, self._clock = name, driver, task, clock
        self._train, self._test = driver.stream.shards, test
        self._train_rows = torch.linspace(0, len(self._train) - 1, min(settings.eval_rows, len(self._train))).long()
        self._out = Path(settings.out)
        self._resumed = driver.progress.updates > 0
        self._record = Record(self._out / RECORD, clock.seconds if self._resumed else None)
        self._display = Display(name, settings.log_every)
        self._board = _board(self._out) if settings.tensorboard else None
        self._shown = (clock.seconds, driver.progress.samples)
        self._warned: set[tuple[str, int]] = set()
        self._scores: dict[str, float] = {}

    def begin(self) -> None:
        """Before the first step."""
        comm, replica = self._driver.comm, self._driver.replica
        event = "resume" if self._resumed else "start"
        self._write(event, algorithm=self._name, roles=str(comm.roles), parameters=replica.params.numel())
        self._display.say(
            f"{self._name} on {comm.size} ranks ({comm.roles}), {replica.params.numel():,} parameters, "
            f"{len(self._train):,} training rows"
        )
        if not self._resumed:
            self.evaluate()

    def evaluate(self) -> None:
        """Measure the model as it stands; the training clock stands still."""
        train, test = self._task.evaluate(self._train, self._train_rows), self._task.evaluate(self._test)
        self._scores = {"train_loss": train.loss, "test_loss": test.loss, "test_error": test.error}
        self._write("eval", **self._scores)
        self._plot(self._scores)
        self._display.say(
            f"{self._name} epoch {self._driver.progress.epochs:.2f}: train loss {train.loss:.4f}, "
            f"test loss {test.loss:.4f}, test error {test.error:.4f}"
        )

    def watch(self, update: Update) -> None:
        """After every update."""
        if update.refused:
            self._warn(update)
        if self._display.due:
            self._report()

    def saved(self) -> None:
        """A checkpoint was written."""
        self._write("checkpoint")

    def finish(self, bytes_sent: int, library: str) -> dict[str, Any]:
        """After the last step: the summary, also written to the run folder."""
        progress, comm = self._driver.progress, self._driver.comm
        measures = {"staleness": (0.0, 1, 0.0), **progress.measures}
        summary = {
            "algorithm": self._name,
            "ranks": comm.size,
            "roles": {role: len(comm.roles.ranks(role)) for role in dict.fromkeys(comm.roles.names)},
            "seconds": self._clock.seconds,
            "epochs": progress.epochs,
            "updates": progress.updates,
            "samples": progress.samples,
            "samples_per_second": progress.samples / max(self._clock.seconds, 1e-9),
            **self._scores,
            **{f"{name}_mean": summed / count for name, (summed, count, _) in measures.items()},
            **{f"{name}_max": largest for name, (*_, largest) in measures.items()},
            "staleness_histogram": dict(sorted(progress.staleness.items())),
            "gradients_by_rank": {rank: turns for rank, turns in sorted(progress.turns.items()) if rank != EVERYONE},
            "refused": progress.refused,
            "bytes_sent": bytes_sent,
            "versions": {**versions(), "mpi": library},
        }
        self._write("end")
        write_json(self._out / SUMMARY, summary)
        self._display.close()
        self._record.close()
        return summary

    def _report(self) -> None:
        """A line of progress."""
        progress = self._driver.progress
        seconds, samples = self._clock.seconds, progress.samples
        rate = (samples - self._shown[1]) / max(seconds - self._shown[0], 1e-9)
        means = {name: summed / count for name, (summed, count, _) in progress.measures.items()}
        self._shown = (seconds, samples)
        facts = {"epoch": progress.epochs, "lr": self._driver.replica.lr, "samples_per_second": rate, **means}
        self._write("progress", **facts, refused=progress.refused)
        self._plot(facts)
        notes = [f"epoch {progress.epochs:.2f}", f"{rate:,.0f} samples/s", f"lr {facts['lr']:.3g}"]
        notes += [f"{name} {mean:.3g}" for name, mean in means.items()]
        notes += [f"{counts.total()} {reason}" for reason, counts in progress.refused.items()]
        self._display.show(progress.fraction, ", ".join(notes))

    def _warn(self, update: Update) -> None:
        """The first refusal of each kind and rank is told at once; all are counted."""
        for source in update.culprits or (EVERYONE,):
            if (update.refused, source) not in self._warned:
                self._warned.add((update.refused, source))
                self._write("refused", reason=update.refused, rank=source)
                whose = f"rank {source}'s gradient" if source != EVERYONE else "the mean gradient"
                self._display.say(f"{self._name}: {whose} was {update.refused}: refused; such gradients are counted")

    def _write(self, event: str, **fields: Any) -> None:
        progress = self._driver.progress
        self._record.write(event, self._clock.seconds, progress.updates, progress.samples, **fields)

    def _plot(self, facts: dict[str, float]) -> None:
        if self._board is not None:
            for name, value in facts.items():
                self._board.add_scalar(name, value, self._driver.progress.updates)
            self._board.flush()


def _board(out: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError("--tensorboard needs the package tensorboard: pip install 'hvdist[tensorboard]'") from error
    return SummaryWriter(str(out / TENSORBOARD))
