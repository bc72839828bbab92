"""The command line: parse, then the same calls a script makes. `hvdist` and `python -m hvdist` are the same.

Nothing but `train` needs MPI; `--help` never starts it.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jsonargparse

from hvdist.algorithms import ALGORITHMS
from hvdist.launch import claimed_rank
from hvdist.schedule import Schedule
from hvdist.settings import Training

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)


class _Parser(jsonargparse.ArgumentParser):
    """Complains once, not once a rank."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if claimed_rank() == 0:
            super().error(message, ex)
        sys.exit(2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command."""
    parser, commands = _parser()
    chosen = parser.parse_args(_with_underscores(sys.argv[1:] if arguments is None else arguments))
    commands[chosen.command](chosen[chosen.command])


def _parser() -> tuple[jsonargparse.ArgumentParser, dict[str, Callable[[Any], None]]]:
    parser = _Parser(prog="hvdist", description=sys.modules["hvdist"].__doc__)
    commands = parser.add_subcommands(dest="command", metavar="COMMAND")
    train = _Parser(description="Train a model; under mpirun or srun, one process a rank.")
    commands.add_subcommand("train", train, help="train a model with one of the algorithms")
    algorithms = train.add_subcommands(dest="algorithm", metavar="ALGORITHM")
    for name, kind in ALGORITHMS.items():
        algorithms.add_subcommand(name, _train_parser(kind), help=_first_line(kind))
    return parser, {"train": _train}


def _train_parser(kind: type) -> jsonargparse.ArgumentParser:
    parser = _Parser(
        description=sys.modules[kind.__module__].__doc__, formatter_class=jsonargparse.DefaultHelpFormatter
    )
    parser.add_argument("--config", action="config", help="A run's config.yaml: do it again. Flags after it win.")
    for settings in (kind, Training, Schedule):
        parser.add_class_arguments(settings)
    return parser


def _train(chosen: Any) -> None:
    from hvdist.trainer import train

    kind, given = ALGORITHMS[chosen.algorithm], chosen[chosen.algorithm]
    algorithm, settings, schedule = (_pick(fields, given) for fields in (kind, Training, Schedule))
    train(algorithm, settings, schedule)


def _pick(kind: type, given: Any) -> Any:
    """The settings of one dataclass, out of all flags."""
    return kind(**{field.name: given[field.name] for field in dataclasses.fields(kind)})


def _with_underscores(arguments: Sequence[str]) -> list[str]:
    """`--max-staleness` is `--max_staleness`: people type both."""
    return [re.sub(r"^--[\w-]+", lambda flag: "--" + flag[0][2:].replace("-", "_"), word) for word in arguments]


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").splitlines()[0]


if __name__ == "__main__":
    main()
