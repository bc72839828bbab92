"""The command line: parse, then the same calls a script makes. `hvdist` and `python -m hvdist` are the same.

Nothing but `train` needs MPI, and `--help` never starts it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import hvdist
from hvdist import bench
from hvdist.algorithm import Algorithm
from hvdist.algorithms import ALGORITHMS
from hvdist.flags import Parser, as_typed, one_sentence, switches_of
from hvdist.info import info
from hvdist.report import report
from hvdist.schedule import Schedule
from hvdist.settings import Training

SETTINGS = (Training, Schedule)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command."""
    given = sys.argv[1:] if arguments is None else arguments
    switches = switches_of(*ALGORITHMS.values(), *SETTINGS, *bench.BENCHES.values(), report, info)
    chosen = _parser().parse_args(as_typed(given, switches))
    command = chosen[chosen.command]
    if chosen.command == "train":
        _train(command.algorithm, command[command.algorithm])
        return
    with one_sentence():
        if chosen.command == "bench":
            bench.BENCHES[command.name](**command[command.name].as_dict())
        else:
            (info if chosen.command == "info" else report)(**command.as_dict())


def _parser() -> Parser:
    parser = Parser(prog="hvdist", description=hvdist.__doc__)
    commands = parser.add_subcommands(dest="command", metavar="COMMAND")
    train = Parser(description="Train a model with one of the algorithms; under mpirun or srun, one process a rank.")
    commands.add_subcommand("train", train, help="train a model with one of the algorithms")
    commands.add_subcommand("report", _parser_of(report, positional="runs"), help=_first_line(report))
    commands.add_subcommand("info", _parser_of(info), help=_first_line(info))
    benches = Parser(description=bench.__doc__)
    commands.add_subcommand("bench", benches, help="measure hvdist beside its rivals and the physical floor")
    algorithms = train.add_subcommands(dest="algorithm", metavar="ALGORITHM")
    for name, kind in ALGORITHMS.items():
        algorithms.add_subcommand(name, _train_parser(kind), help=_first_line(kind))
    names = benches.add_subcommands(dest="name", metavar="NAME")
    for name, function in bench.BENCHES.items():
        names.add_subcommand(name, _parser_of(function), help=_first_line(function))
    return parser


def _train_parser(kind: type[Algorithm]) -> Parser:
    example = f"example:\n  mpirun -n 4 hvdist train {kind.name} --data shards/fashion-mnist --out runs/{kind.name}\n"
    parser = Parser(description=f"{sys.modules[kind.__module__].__doc__}\n{example}")
    parser.add_argument("--config", action="config", help="a run's config.yaml, to do it again; flags after it win")
    for settings in (kind, *SETTINGS):
        parser.add_class_arguments(settings)
    return parser


def _parser_of(function: Callable[..., None], positional: str = "") -> Parser:
    """A function's parameters as flags, but for one that is a list of words without a flag."""
    parser = Parser(description=(function.__doc__ or "").split("\n\n")[0])
    if positional:
        parser.add_argument(positional, nargs="+", type=str, help="one or more")
    parser.add_function_arguments(function, as_group=False, skip={positional} if positional else None)
    return parser


def _train(algorithm: str, given: Any) -> None:
    with one_sentence():
        kinds: tuple[Any, ...] = (ALGORITHMS[algorithm], *SETTINGS)
        chosen, settings, schedule = (
            kind(**{field.name: given[field.name] for field in dataclasses.fields(kind)}) for kind in kinds
        )
    # from here on a mistake must end the whole job: that is hvdist.comm's guard
    from hvdist.trainer import train

    train(chosen, settings, schedule)


def _first_line(documented: Callable[..., Any]) -> str:
    return (documented.__doc__ or "").splitlines()[0]


if __name__ == "__main__":
    main()
