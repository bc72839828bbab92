#!/usr/bin/env bash
# Set up, then run every check and every test. Words after the script go to pytest: bash tests/run.sh -k shards
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash jobs/setup.sh --dev
source jobs/site.sh

ruff check --quiet .
ruff format --check --quiet .
mypy --no-error-summary
lint-imports --no-logo >.venv/lint-imports.log || { cat .venv/lint-imports.log; exit 1; }
shellcheck -x jobs/*.sh jobs/*.sbatch tests/run.sh .ci/run
python -m pytest "$@"
