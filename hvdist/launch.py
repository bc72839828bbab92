"""How this process was started, from its environment alone; MPI is not touched.

Every launcher leaves its own variables; one table maps them to our words.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from hvdist.errors import UserError

# launcher -> (its count of ranks, this process's rank)
_VARIABLES = {
    "Open MPI's mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "a PMI launcher": ("PMI_SIZE", "PMI_RANK"),
    "Slurm": ("SLURM_NTASKS", "SLURM_PROCID"),
}


def claimed_rank(environment: Mapping[str, str] = os.environ) -> int:
    """This process's rank by its launcher's word; 0 where it was started by hand. Good before MPI is up."""
    for size, rank in _VARIABLES.values():
        if size in environment and environment.get(rank, "").isdigit():
            return int(environment[rank])
    return 0


def refuse_singletons(size: int, environment: Mapping[str, str] = os.environ) -> None:
    """Stop when a launcher started several processes that MPI takes for several worlds of one.

    Args:
        size: MPI's count of ranks.
        environment: of this process.
    Raises:
        UserError: a launcher counts more than one process while MPI counts one.
    """
    if size > 1:
        return
    for launcher, (variable, _) in _VARIABLES.items():
        count = environment.get(variable, "1")
        if count.isdigit() and int(count) > 1:
            raise UserError(
                f"{launcher} counts {count} processes ({variable}={count}) but MPI sees each of them alone, on "
                f"{socket.gethostname()}: all would train the same run and write the same files. Start them with the "
                "mpirun of the MPI that mpi4py uses, or with srun --mpi=pmix (srun --mpi=list shows what this Slurm "
                "has; the Open MPI wheel from PyPI also needs PMIX_MCA_psec=native). For one rank on purpose, ask "
                f"for one task or unset {variable}"
            )


def writes_to_terminal() -> bool:
    """Whether a person watches stderr: it is a terminal, or the pipe of an mpirun whose own stderr is one."""
    if os.isatty(2):
        return True
    if "OMPI_COMM_WORLD_SIZE" not in os.environ:
        return False
    try:  # mpirun hands its children pipes; only its own descriptor tells where they lead
        return os.readlink(f"/proc/{os.getppid()}/fd/2").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False
