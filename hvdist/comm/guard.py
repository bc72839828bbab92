"""A rank that fails ends the whole job, and says who it was: elsewhere the others would wait for it for ever."""

from __future__ import annotations

import atexit
import functools
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType

from mpi4py import MPI

from hvdist.errors import UserError
from hvdist.launch import claimed_rank

EXIT_PATIENCE_SECONDS = 10.0
"""How long a rank that leaves without `close` waits for the others to leave too."""
_STAGGER_SECONDS = 0.25

# A fault all ranks share is told once: the lowest rank speaks first and its abort silences the rest.
_LONGEST_STAGGER_SECONDS = 2.5


class Guard:
    """Ends the job on an uncaught exception of this process, or on leaving while others still work.

    Attributes:
        role: this rank's role, once it is known.
        leave: leaves the job together with the other ranks, within a deadline in seconds; None before and after.
    """

    def __init__(self) -> None:
        self.role = ""
        self.leave: Callable[[float], None] | None = None
        sys.excepthook = self._failed
        threading.excepthook = lambda args: self._failed(args.exc_type, args.exc_value, args.exc_traceback)
        atexit.register(self._exits)

    @property
    def label(self) -> str:
        """Who speaks: "[rank 3 worker @node17]"."""
        return f"[{' '.join(filter(None, (f'rank {MPI.COMM_WORLD.rank}', self.role, f'@{socket.gethostname()}')))}]"

    def _failed(self, kind: type[BaseException], error: BaseException | None, where: TracebackType | None) -> None:
        if MPI.COMM_WORLD.size == 1 and claimed_rank() > 0:  # one of several worlds of one: the first tells for all
            os._exit(1)
        time.sleep(min(_STAGGER_SECONDS * MPI.COMM_WORLD.rank, _LONGEST_STAGGER_SECONDS))
        if isinstance(error, UserError):
            self._end(str(error))
        self._end("".join(traceback.format_exception(kind, error, where)).rstrip())

    def _exits(self) -> None:
        try:
            if self.leave:
                self.leave(EXIT_PATIENCE_SECONDS)
        except TimeoutError:
            self._end(
                "this rank left without comm.close() while others still wait for it; call comm.close() at the end of "
                "the script on every rank, and leave early on none"
            )

    def _end(self, message: str) -> None:
        sys.stdout.flush()
        print(f"{self.label} {message}", file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(1)


@functools.cache
def watch() -> Guard:
    """This process's guard; on duty from the first call on."""
    return Guard()
