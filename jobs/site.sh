# shellcheck shell=bash
# This site in one place: source it in every job, and in the shell you work from.

# 1. Modules of your cluster, loaded before jobs/setup.sh runs and in every job; nothing on a laptop.
# module load gcc openmpi

# 2. The environment that jobs/setup.sh made.
# shellcheck disable=SC1091
source "$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/activate"

# 3. Open MPI. Outside a batch job: more ranks than cores are fine, root too (in a container, say).
if [ -z "${SLURM_JOB_ID:-}" ]; then
    export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
    export OMPI_MCA_mpi_yield_when_idle=1
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
# The Open MPI wheel started by srun: without these the ranks do not find each other, nor the library its own files.
if [ -x "$VIRTUAL_ENV/bin/ompi_info" ]; then
    export PMIX_MCA_psec=native OPAL_PREFIX=$VIRTUAL_ENV
fi

# 4. How this Slurm starts MPI ranks; `srun --mpi=list` shows what it has.
export SLURM_MPI=${SLURM_MPI:-pmix}
