"""`hvdist info`: what is installed, who is where, and every problem with its cure."""

from __future__ import annotations

import shutil

from hvdist import launch
from hvdist.algorithms import ALGORITHMS
from hvdist.errors import UserError
from hvdist.roles import Roles
from hvdist.update import has_compiler
from hvdist.versions import versions


def info(algorithm: str = "dcasgd") -> None:
    """Show versions, MPI, Horovod, each rank's host and role, and problems with their cures.

    Args:
        algorithm: Whose roles the ranks are shown in; with its default settings.
    """
    if algorithm not in ALGORITHMS:
        raise UserError(f"no algorithm {algorithm!r}; there are {', '.join(ALGORITHMS)}")
    problems: list[str] = []
    hosts: list[str] = []
    rows = [*versions().items()]
    try:
        from hvdist.comm import probe
    except UserError as error:
        problems.append(str(error))
        rank = 0
    else:
        rank, hosts = probe.rank_and_hosts()
        rows += [("MPI", f"{probe.library()}, thread level {probe.thread_level()}")]
        rows += [("Horovod", _horovod(problems))]
        if probe.thread_level() != "MULTIPLE":
            problems.append(
                "thread level below MULTIPLE: Horovod cannot run beside mpi4py; unset MPI4PY_RC_THREAD_LEVEL"
            )
        try:
            launch.refuse_singletons(len(hosts))
        except UserError as error:
            problems.append(str(error))
    rows += [("mpirun", shutil.which("mpirun")), ("C++ compiler", "found" if has_compiler() else None)]
    if not has_compiler():
        problems.append(
            "no C++ compiler: Horovod cannot be built, large servers update 2 to 3 times slower; install g++"
        )
    if rank == 0:
        _print(rows, _placement(algorithm, hosts, problems), problems)


def _horovod(problems: list[str]) -> str | None:
    from hvdist.comm import probe

    try:
        build = probe.horovod_build()
    except ImportError as error:
        problems.append(f"Horovod does not load ({error}): rebuild it, bash jobs/setup.sh --rebuild-horovod")
        return None
    if build is None:
        problems.append("Horovod is not installed: means run on MPI's allreduce, without overlap; bash jobs/setup.sh")
    elif "MPI" not in build:
        problems.append(f"Horovod was built with {build}, without MPI: bash jobs/setup.sh --rebuild-horovod")
    return build


def _placement(algorithm: str, hosts: list[str], problems: list[str]) -> list[tuple[str, str, str]]:
    """Rank, host and role, line by line."""
    try:
        roles = Roles.fill(ALGORITHMS[algorithm]().seats, len(hosts)).names
    except UserError as error:
        if len(hosts) > 1:
            problems.append(f"{algorithm}: {error}")
        roles = ("-",) * len(hosts)
    return [(str(rank), host, role) for rank, (host, role) in enumerate(zip(hosts, roles, strict=True))]


def _print(rows: list[tuple[str, str | None]], placement: list[tuple[str, str, str]], problems: list[str]) -> None:
    for name, value in rows:
        print(f"{name:14} {value or 'not found'}")
    print(f"\n{'rank':14} {'host':24} role")
    for rank, host, role in placement:
        print(f"{rank:14} {host:24} {role}")
    print("\nno problems" if not problems else "\nproblems:")
    for problem in problems:
        print(f"- {problem}")
