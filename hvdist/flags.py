"""From a function or a dataclass to a command's flags, and from a user's mistake to one sentence."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse

from hvdist.errors import UserError
from hvdist.launch import claimed_rank

# The docstring beneath a field is its help.
jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)


class _Verbatim(argparse.RawDescriptionHelpFormatter, jsonargparse.DefaultHelpFormatter):
    """Leaves descriptions, with their tables, as they are."""


class Parser(jsonargparse.ArgumentParser):
    """Complains once, not once a rank."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Verbatim, **options})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print usage and message, exit with 2."""
        if claimed_rank() == 0:
            super().error(message, ex)
        sys.exit(2)


def as_typed(arguments: Sequence[str], switches: Collection[str] = ()) -> list[str]:
    """Flags as people type them, made the parser's: `--max-staleness 3` is `--max_staleness 3`, `--resume` is
    `--resume true`.

    Args:
        arguments: of the command line.
        switches: names of the flags that are true or false.
    """
    words = [re.sub(r"^--[\w.-]+", lambda flag: "--" + flag[0][2:].replace("-", "_"), word) for word in arguments]
    last = [*words[1:], "--"]
    bare = [word[2:] in switches and after.startswith("-") for word, after in zip(words, last, strict=True)]
    return [f"{word}=true" if is_bare else word for word, is_bare in zip(words, bare, strict=True)]


def switches_of(*settings: Callable[..., Any]) -> set[str]:
    """Names of the settings that are true or false, of functions or dataclasses and the dataclasses they take."""
    switches: set[str] = set()
    for one in settings:
        parameters = inspect.signature(one).parameters.values()
        switches |= {parameter.name for parameter in parameters if isinstance(parameter.default, bool)}
        if inspect.isfunction(one):
            switches |= switches_of(*_groups(one).values())
    return switches


def run(function: Callable[..., None], arguments: Sequence[str] | None = None) -> None:
    """Call a function with the command line's flags, named and explained by its signature and docstring.

    A parameter that is a dataclass gives its fields as flags.
    """
    given = as_typed(sys.argv[1:] if arguments is None else arguments, switches_of(function))
    groups = _groups(function)
    parser = Parser(description=function.__doc__.split("\n\n")[0] if function.__doc__ else None)
    parser.add_function_arguments(function, as_group=False, skip=set(groups))
    for kind in groups.values():
        parser.add_class_arguments(kind)
    with one_sentence():
        flags = parser.parse_args(given).as_dict()
        for name, kind in groups.items():
            flags[name] = kind(**{field.name: flags.pop(field.name) for field in dataclasses.fields(kind)})
        function(**flags)


def _groups(function: Callable[..., Any]) -> dict[str, Any]:
    """The parameters that are dataclasses."""
    hints = typing.get_type_hints(function)
    return {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """A user's mistake inside ends the process with its sentence and status 1, without a traceback.

    Under a launcher all ranks make the same mistake, and the first one tells it.
    """
    try:
        yield
    except UserError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}" if claimed_rank() == 0 else 1)
